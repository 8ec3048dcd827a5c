"""Checks that training had an effect: a run that learned nothing must not end as done.

Called by `train` after the last step, by all ranks together.
"""

from __future__ import annotations

import math
from itertools import islice

from ortflow.workflow.errors import UserError
from ortflow.workflow.steps.context import Context
from ortflow.workflow.steps.not_finite import in_micro_batches

TRIED = 64
"""Number of micro-batches of which at least one must give a finite loss: some may have damaged samples or no labels."""
FIX = (
    "check that the data and the model's values are finite (a division by 0 or a logarithm of 0 is not), "
    "lower train.optimizer.lr, lengthen train.schedule.warmup_steps or set train.clip_norm"
)

DATA_FIX = "convert the data without such values"


def check_usable(context: Context) -> None:
    """Raise UserError if no step changed a parameter, or if the trained model's loss is not finite."""
    progress = context.progress
    if progress.updates == 0:
        sample = context.stream.first_not_finite()
        raise UserError(
            f"all {progress.step} steps of the run were skipped, because none had a finite loss and gradient: "
            f"no parameter was trained{'; ' * bool(sample)}{sample}",
            where=f"step {progress.step}",
            fix=DATA_FIX if sample else FIX,
        )
    losses = []
    # A batch with NaN in its samples says nothing about the model.
    for batch in islice(
        (candidate for candidate in context.stream.samples() if not in_micro_batches([candidate])), TRIED
    ):
        losses.append(context.trainer.evaluate([batch], tuple).metrics["loss"])
        if math.isfinite(losses[-1]):
            return
    if losses:
        skipped = f", and the last {progress.skipped_in_a_row} steps were skipped" if progress.skipped_in_a_row else ""
        raise UserError(
            f"the loss of the trained model is {losses[0]} on each of {len(losses)} micro-batches{skipped}",
            where=f"step {progress.step}",
            fix=FIX,
        )
