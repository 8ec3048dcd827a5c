"""Warns of a loss of logits whose output has the values of probabilities, in a form that no node shows.

Called by the trainers when they try the export before the first step: its outputs on real samples are there, whatever
the layout, so that looking at them costs nothing. Without an export nothing is looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ortflow.workflow.graph.types import GraphSet
from ortflow.workflow.spec.losses import ClassLoss, Ctc, Divergence
from ortflow.workflow.spec.model import Loss
from ortflow.workflow.trainer import Report
from ortflow.workflow.trainer.export.inference import Watch

ROUNDING = 1e-3
"""How far the sum of a sample's probabilities may be from 1, and a probability from the range: fp16's rounding."""

Array = npt.NDArray[Any]


def watch_logits(graphs: GraphSet, loss: Loss, report: Report) -> Watch | None:
    """What looks at the outputs of a model; None if the loss reads no logits, or certainly logits."""
    name = graphs.unproved_logits
    if not name:
        return None

    def watch(outputs: Mapping[str, Array]) -> None:
        axis = loss.class_axis if isinstance(loss, ClassLoss | Ctc | Divergence) else None
        # An output that depends on a label is not exported.
        if name in outputs and seem_probabilities(outputs[name], axis):
            also = "" if axis is None else " and sum to 1 over the classes"
            report.warn(
                f"the values of output {name!r} on the first samples lie between 0 and 1{also}, as probabilities do,"
                f" and {loss.kind} takes logits: export the model without what makes probabilities of them, or name"
                " an output with the logits under model.loss.output"
            )

    return watch


def seem_probabilities(values: Array, class_axis: int | None) -> bool:
    """Whether values are those of distributions along an axis, or, without one, of independent probabilities.

    The latter must differ: a layer that starts with zeros gives one number.
    """
    if not values.size or not np.issubdtype(values.dtype, np.floating):
        return False
    # NaN is outside too.
    if not (values.min() >= -ROUNDING and values.max() <= 1 + ROUNDING):
        return False
    if class_axis is None:
        return bool(values.min() >= 0 and values.max() <= 1 and values.min() < values.max())
    return bool(np.allclose(values.sum(axis=class_axis, dtype=np.float64), 1, rtol=0, atol=ROUNDING))
