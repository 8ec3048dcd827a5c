"""Layer and RMS normalisation, their gradients, and the row sums of bias gradients; see norm.c and sums.c."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import onnx

from ortflow.workflow.graph.domains import MICROSOFT
from ortflow.workflow.graph.ir.edit import attributes_of
from ortflow.workflow.graph.ir.rewriter import Rewriter, is_last_axis, width_of

_EPSILON = 1e-5


class Norm(NamedTuple):
    """A normalisation over the last axis, or the gradient of one."""

    operator: str
    node: onnx.NodeProto
    inputs: list[str]
    outputs: list[str]
    attributes: dict[str, float]


def put(rewriter: Rewriter) -> None:
    """Replace normalisations over the last axis, and sums over all other axes."""
    for norm in norms(rewriter):
        rewriter.drop(norm.node)
        rewriter.add(norm.operator, norm.inputs, norm.outputs, **norm.attributes)
    for node, axes in leading_sums(rewriter):
        dims = rewriter.dims(node.input[0])
        if dims is not None and axes == len(dims) - 1 and _fits(rewriter, node.input[0]):
            rewriter.drop(node)
            rewriter.add("ColumnSums", node.input[:1], node.output)


def norms(rewriter: Rewriter) -> Iterator[Norm]:
    """Layer and RMS normalisations over the last axis and their gradients, all fp32 and with all outputs present."""
    for operator, domain, name, most, count in _NORMS:
        for node in rewriter.nodes(operator, domain):
            inputs, outputs = [n for n in node.input if n], [n for n in node.output if n]
            gradient = domain == MICROSOFT
            x, vectors = (inputs[1], inputs[2:3]) if gradient else (inputs[0], inputs[1:most])
            if len(outputs) == count and _is_normal(rewriter, node, x, vectors):
                epsilon = {} if gradient else {"epsilon": float(attributes_of(node).get("epsilon", _EPSILON))}
                yield Norm(name, node, inputs, outputs, epsilon)


_NORMS = (
    ("LayerNormalization", "", "LayerNormalization", 3, 3),
    ("LayerNormalizationGrad", MICROSOFT, "LayerNormalizationGrad", 5, 3),
    ("SimplifiedLayerNormalization", "", "RMSNormalization", 2, 2),
    ("SimplifiedLayerNormalizationGrad", MICROSOFT, "RMSNormalizationGrad", 4, 2),
)
"""Operator, its domain, our operator, most inputs, outputs."""


def leading_sums(rewriter: Rewriter) -> Iterator[tuple[onnx.NodeProto, int]]:
    """Sums that drop some, but not all, of the leading axes, and the number of these axes."""
    for node in rewriter.nodes("ReduceSum"):
        axes = rewriter.integers(node.input[1]) if len(node.input) > 1 and node.input[1] else None
        dims = rewriter.dims(node.input[0])
        if not axes or not dims or attributes_of(node).get("keepdims", 1):
            continue
        places = sorted(axis % len(dims) for axis in axes)
        if places == list(range(len(places))) and len(places) < len(dims):
            yield node, len(places)


def _is_normal(rewriter: Rewriter, node: onnx.NodeProto, x: str, vectors: Sequence[str]) -> bool:
    """Whether it normalises the last axis, with a scale and a bias of that length."""
    dims = rewriter.dims(x)
    lengths = {rewriter.dims(vector) for vector in vectors}
    return _fits(rewriter, x) and is_last_axis(node, dims) and dims is not None and lengths == {dims[-1:]}


def _fits(rewriter: Rewriter, value: str) -> bool:
    return rewriter.fits(value) and width_of(rewriter.dims(value)) is not None
