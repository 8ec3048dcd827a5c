"""Layer and RMS norm and their gradients, and the sums over rows that biases have for gradients: see norm.c, sums.c."""

from __future__ import annotations

from collections.abc import Sequence

import onnx

from ortflow.workflow.graph.edit import MICROSOFT, attributes_of
from ortflow.workflow.kernels.rewriter import Rewriter, is_last_axis, width_of

_EPSILON = 1e-5


def put(rewriter: Rewriter) -> None:
    """Replace normalisations over the last axis, and sums over all others."""
    for node in rewriter.nodes("LayerNormalization"):
        inputs, outputs = [n for n in node.input if n], [n for n in node.output if n]
        if _is_normal(rewriter, node, inputs[0], inputs[1:]) and len(outputs) == 3:
            epsilon = float(attributes_of(node).get("epsilon", _EPSILON))
            rewriter.drop(node)
            rewriter.add("LayerNormalization", inputs, outputs, epsilon=epsilon)
    for node in rewriter.nodes("LayerNormalizationGrad", MICROSOFT):
        outputs = [n for n in node.output if n]
        if _is_normal(rewriter, node, node.input[1], node.input[2:3]) and len(outputs) == 3:
            rewriter.drop(node)
            rewriter.add("LayerNormalizationGrad", node.input, outputs)
    for node in rewriter.nodes("SimplifiedLayerNormalization"):
        if _is_normal(rewriter, node, node.input[0], node.input[1:]) and len(node.output) == 2:
            epsilon = float(attributes_of(node).get("epsilon", _EPSILON))
            rewriter.drop(node)
            rewriter.add("RMSNormalization", node.input, node.output, epsilon=epsilon)
    for node in rewriter.nodes("SimplifiedLayerNormalizationGrad", MICROSOFT):
        outputs = [n for n in node.output if n]
        if _is_normal(rewriter, node, node.input[1], node.input[2:3]) and len(outputs) == 2:
            rewriter.drop(node)
            rewriter.add("RMSNormalizationGrad", node.input, outputs)
    for node in rewriter.nodes("ReduceSum"):
        axes = rewriter.integers(node.input[1]) if len(node.input) > 1 else None
        dims = rewriter.dims(node.input[0])
        others = list(range(len(dims) - 1)) if dims is not None and _fits(rewriter, node.input[0]) else []
        if axes and sorted(axes) == others and not attributes_of(node).get("keepdims", 1):
            rewriter.drop(node)
            rewriter.add("ColumnSums", node.input[:1], node.output)


def _is_normal(rewriter: Rewriter, node: onnx.NodeProto, x: str, vectors: Sequence[str]) -> bool:
    """Over the last axis, with a scale and a bias as long as that."""
    dims = rewriter.dims(x)
    lengths = {rewriter.dims(vector) for vector in vectors}
    return _fits(rewriter, x) and is_last_axis(node, dims) and dims is not None and lengths == {dims[-1:]}


def _fits(rewriter: Rewriter, value: str) -> bool:
    return rewriter.fits(value) and width_of(rewriter.dims(value)) is not None
