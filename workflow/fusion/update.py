"""An optimizer's update in the form for GPUs with ortflow's kernels. Pure.

Called by step `configure`, and by the trainer for the update of a group of parameters.
"""

from __future__ import annotations

import onnx

from ortflow.workflow.fusion.groups import fuse
from ortflow.workflow.fusion.half import HALVES
from ortflow.workflow.fusion.rounded import writing_rounded
from ortflow.workflow.fusion.scalars import scalars_in_one
from ortflow.workflow.optim.guard import guarded


def fused_update(model: onnx.ModelProto, precision: str, *, multiplied: bool = True) -> tuple[onnx.ModelProto, int]:
    """The form of an undivided run's update, and the number of fused nodes.

    Parameters
    ----------
    model
        The update in ONNX's operators.
    precision
        `train.precision`; a half one has the rounded parameters as further outputs.
    multiplied
        See `guarded`.
    """
    update = guarded(model, multiplied=multiplied)
    if precision in HALVES:
        update = writing_rounded(update, HALVES[precision])
    update, count = fuse(update)
    return scalars_in_one(update)[0], count
