"""LayerNormalization and its gradient, and the sums over rows that biases have for gradients: see norm.c, sums.c."""

from __future__ import annotations

from ortflow.workflow.graph.edit import MICROSOFT
from ortflow.workflow.kernels.rewriter import Rewriter, attributes_of, is_last_axis, width_of

_MOST_AXES = 8
_EPSILON = 1e-5


def put(rewriter: Rewriter) -> None:
    """Replace normalisations over the last axis, and sums over all others."""
    for node in list(rewriter.nodes("LayerNormalization")):
        dims = rewriter.dims(node.input[0])
        outputs = [name for name in node.output if name]
        if _fits(rewriter, node.input[0]) and is_last_axis(node, dims) and len(outputs) == 3:
            rewriter.drop(node)
            epsilon = float(attributes_of(node).get("epsilon", _EPSILON))
            rewriter.add("LayerNormalization", [n for n in node.input if n], outputs, epsilon=epsilon)
    for node in list(rewriter.nodes("LayerNormalizationGrad", MICROSOFT)):
        dims = rewriter.dims(node.input[1])
        outputs = [name for name in node.output if name]
        if _fits(rewriter, node.input[1]) and is_last_axis(node, dims) and len(outputs) == 3:
            rewriter.drop(node)
            rewriter.add("LayerNormalizationGrad", node.input, outputs)
    for node in list(rewriter.nodes("ReduceSum")):
        dims = rewriter.dims(node.input[0])
        axes = rewriter.integers(node.input[1]) if len(node.input) > 1 else None
        keeps = attributes_of(node).get("keepdims", 1)
        if (
            dims
            and not keeps
            and axes
            and _fits(rewriter, node.input[0])
            and sorted(axes) == list(range(len(dims) - 1))
        ):
            rewriter.drop(node)
            rewriter.add("ColumnSums", node.input[:1], node.output)


def _fits(rewriter: Rewriter, value: str) -> bool:
    dims = rewriter.dims(value)
    return rewriter.is_fp32(value) and width_of(dims) is not None and dims is not None and len(dims) <= _MOST_AXES
