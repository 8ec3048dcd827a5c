"""Finds the sample at which an evaluation has no finite loss, and describes the values of samples that are not finite.

Called by `train`: by all ranks together after an evaluation with NaN or infinity, and where a run ends because of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ortflow.workflow.spec.losses import Ctc
from ortflow.workflow.spec.model import single_losses
from ortflow.workflow.spec.run import TrainerRunSpec
from ortflow.workflow.steps.context import Context
from ortflow.workflow.trainer import EvaluationOutcome, MicroBatch


def is_finite(outcome: EvaluationOutcome) -> bool:
    """Whether the losses and all metrics are finite."""
    return all(map(math.isfinite, outcome.metrics.values()))


def is_comparable(results: Mapping[str, float], name: str) -> bool:
    """Whether the result `name`, `METRIC` or `SET/METRIC`, may be compared with that of another evaluation.

    It is finite, and so are the losses of its set: of logits that are NaN, an accuracy is a number. A metric that is
    NaN because no label counts (AUROC of a set with one class) says nothing about the other results.
    """
    of_set = name.rpartition("/")[0]
    losses = [
        value for key, value in results.items()
        if key.rpartition("/")[0] == of_set and key.rpartition("/")[2].partition(".")[0] == "loss"
    ]  # fmt: skip
    return all(map(math.isfinite, [results[name], *losses]))


def infinite_ctc(spec: TrainerRunSpec, reason: str) -> str:
    """What to do about a loss that is not finite, if one of the run's losses is ctc; else empty. Pure."""
    losses = single_losses(spec.model.loss) if spec.model is not None else {}
    loss_path = next((path for path, loss in losses.items() if isinstance(loss, Ctc)), None)
    if loss_path is None or not reason.startswith("the loss is"):
        return ""
    if "nan" in reason:
        return f"correct the labels and lengths of {loss_path}: one of them is out of range"
    return (
        "leave out samples whose labels do not fit in their frames (a frame for each label, and one between equal"
        f" ones), or set {loss_path}.zero_infinity"
    )


def cause_in_evaluation(context: Context, outcome: EvaluationOutcome) -> str:
    """Why an evaluation is not finite, with the sample if there is one. Collective."""
    data = context.spec.data.eval
    path = (data if data is not None else context.spec.data.train).title
    rank_places = context.world.gather(context.stream.evaluation_place(outcome.not_finite))
    places = [place for place in rank_places or () if place is not None]
    place = context.world.broadcast_object(min(places) if places else None)
    if place is None:
        return f"no micro-batch of {path} alone; a loss without labels that count is nan"
    batch = context.stream.evaluation_batch(place)
    row = _row_of_values(batch)
    row = _row_of_loss(context, batch) if row is None else row
    first = place * context.stream.evaluation_batch_size
    if row is None:
        return f"first at samples {first} to {first + batch.count - 1} of {path} together"
    values = described(batch.arrays, row) or "finite values"
    return f"first at sample {first + row} of {path}, which has {values}"


def described(arrays: Mapping[str, npt.NDArray[np.generic]], row: int) -> str:
    """The first input that is not finite in a row of a micro-batch: "nan in input 'x'"; empty if none is."""
    for name, array in arrays.items():
        bad = _not_finite(array[row : row + 1])
        if bad.size:
            return f"{bad[0]} in input {name!r}"
    return ""


def in_micro_batches(batches: Sequence[MicroBatch]) -> str:
    """The same of the first such row of several micro-batches; empty if there is none."""
    for batch in batches:
        row = _row_of_values(batch)
        if row is not None:
            return described(batch.arrays, row)
    return ""


def _row_of_values(batch: MicroBatch) -> int | None:
    """The first row with a value that is NaN or infinite."""
    return next((row for row in range(batch.count) if described(batch.arrays, row)), None)


def _not_finite(array: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    if array.dtype.kind != "f":
        return array[:0].reshape(-1)
    finite: npt.NDArray[np.bool_] = np.isfinite(array)
    bad: npt.NDArray[np.generic] = array[~finite]
    return bad


def _row_of_loss(context: Context, batch: MicroBatch) -> int | None:
    """The first row whose loss is not finite, by halving; None if each half has a finite loss. Collective."""
    rows = np.arange(batch.count)
    while len(rows) > 1:
        half = len(rows) // 2
        halves = (rows[:half], rows[half:])
        bad_half = next((part for part in halves if not _loss_is_finite(context, batch, part)), None)
        if bad_half is None:
            return None
        rows = bad_half
    return int(rows[0])


def _loss_is_finite(context: Context, batch: MicroBatch, rows: npt.NDArray[np.int64]) -> bool:
    """Whether the evaluation of some rows, repeated to the batch's size, has a finite loss: a size may be fixed."""
    size = max(map(len, batch.arrays.values()))
    arrays = {name: array[np.resize(rows, size)] for name, array in batch.arrays.items()}
    outcome = context.trainer.evaluate([MicroBatch(arrays, batch.count)], tuple)
    # Rows without a label that counts have no mean loss; their sum is finite.
    bad = context.world.gather(outcome.not_finite is not None)
    return not context.world.broadcast_object(bad is not None and any(bad))
