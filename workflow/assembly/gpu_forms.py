"""The forms of an undivided training graph that ranks on GPUs run in fp32. Called by step `configure`."""

from __future__ import annotations

import onnx

from ortflow.workflow.assembly.targets import CUDA, FUSED, OWN_FUSED
from ortflow.workflow.cuda import FUSED as FUSED_GROUP
from ortflow.workflow.cuda import FUSED_SUMS
from ortflow.workflow.graph.forms import Form
from ortflow.workflow.graph.ir.passes import Watch, copied, unwatched


def gpu_forms(
    plain: onnx.ModelProto, placed: onnx.ModelProto | None, watch: Watch = unwatched
) -> dict[Form, onnx.ModelProto]:
    """`Form.CUDA`, and `Form.FUSED` if a group of nodes was fused.

    Parameters
    ----------
    plain
        `Form.PLAIN`.
    placed
        `Form.PLACED`; None for the user's own training graph.
    """
    adapted = CUDA.run(plain, None, watch)
    fused = OWN_FUSED.run(copied(adapted), None, watch) if placed is None else FUSED.run(placed, None, watch)
    has_groups = any(node.op_type in (FUSED_GROUP, FUSED_SUMS) for node in fused.graph.node)
    return {Form.CUDA: adapted, **({Form.FUSED: fused} if has_groups else {})}
