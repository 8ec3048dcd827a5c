"""Checks that training had an effect: a run that learned nothing must not end as done.

Called by `train` after the last step, by all ranks together.
"""

from __future__ import annotations

import math
from itertools import islice

from ortflow.workflow.errors import UserError
from ortflow.workflow.steps.context import Context

TRIED = 64
"""Number of micro-batches of which at least one must give a finite loss: some may have damaged samples or no labels."""
FIX = (
    "check that the data and the model's values are finite (a division by 0 or a logarithm of 0 is not), "
    "lower train.optimizer.lr, lengthen train.schedule.warmup_steps or set train.clip_norm"
)


def check_usable(context: Context) -> None:
    """Raise UserError if no step changed a parameter, or if the trained model's loss is not finite."""
    progress = context.progress
    if progress.updates == 0:
        raise UserError(
            f"all {progress.step} steps of the run were skipped, because none had a finite loss and gradient: "
            "no parameter was trained",
            where=f"step {progress.step}",
            fix=FIX,
        )
    losses = []
    for batch in islice(context.stream.samples(), TRIED):
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
