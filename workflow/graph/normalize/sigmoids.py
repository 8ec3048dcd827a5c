"""Writes sigmoids whose logarithm is taken so that they are exact for very negative inputs, too.

Called by `fusions`. On CPUs the error of ONNX Runtime's Sigmoid is 1e-7, whatever its value: that is half a percent at
-12 and a sixth at -15, and below -18 it returns 0. PyTorch's exporters write `logsigmoid` as Log(Sigmoid(x)), and
BCEWithLogitsLoss with Log(1 - Sigmoid(x)), which is minus infinity for large x in single precision. With
log s(x) = min(x, 0) - log(1 + exp(-|x|)), both and their gradients are right everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import numpy_helper

from ortflow.workflow.graph.ir import shapes, walk
from ortflow.workflow.graph.ir.replacement import Context, Replacement, copy_of

Written = dict[str, list[onnx.NodeProto] | None]
_PASSING = frozenset(
    {
        "Add", "Cast", "Clip", "Concat", "Expand", "Flatten", "Gather", "GatherElements", "Identity", "Max", "Min",
        "Mul", "Neg", "Pow", "Reshape", "Slice", "Squeeze", "Sub", "Transpose", "Unsqueeze", "Where",
    }
)  # fmt: skip
"""Operators through which a small value can become the one whose logarithm is taken."""


def exact_logarithms(graph: onnx.GraphProto, context: Context) -> Written:
    """What replaces such nodes, by their names; readers on the way to a logarithm are renamed in place."""
    if not any(node.op_type == "Log" and not node.domain for node in graph.node):
        return {}
    makers = walk.producers(graph)
    replacements: Written = {}
    for node in graph.node:
        if node.op_type == "Log" and not node.domain:
            w = Replacement(node, context)
            if x := _sigmoid_input(w, makers):
                replacements[node.name] = w.done(_logarithm(w, x))
    readers = {name: [node for node, _ in uses] for name, uses in walk.consumers(graph).items()}
    for node in graph.node:
        if node.op_type == "Sigmoid" and not node.domain:
            w = Replacement(node, context)
            reached: dict[str, bool] = {}
            to_log = [
                r
                for r in readers.get(w.output(0), [])
                if r.name not in replacements and _reaches(r, readers, replacements, reached)
            ]
            if to_log:
                exact = w("Exp", _logarithm(w, w.input(0)))
                replacements[node.name] = [copy_of(node), *w.nodes]
                for reader in to_log:
                    reader.input[:] = [exact if name == w.output(0) else name for name in reader.input]
    return replacements


def _sigmoid_input(w: Replacement, makers: Mapping[str, onnx.NodeProto]) -> str:
    """x of the logarithm of s(x), or of 1 - s(x) = s(-x), which is written; empty if it is another one."""
    maker = makers.get(w.input(0))
    if maker is None or maker.domain:
        return ""
    if maker.op_type == "Sigmoid":
        return str(maker.input[0])
    sigmoid: onnx.NodeProto | None = None
    if maker.op_type == "Sub" and _is_one(w, maker.input[0]):
        sigmoid = makers.get(maker.input[1])
    elif maker.op_type == "Add":
        for operand, other in (maker.input, reversed(maker.input)):
            negated = makers.get(other)
            if _is_one(w, operand) and negated is not None and negated.op_type == "Neg":
                sigmoid = makers.get(negated.input[0])
    return str(w("Neg", sigmoid.input[0])) if sigmoid is not None and sigmoid.op_type == "Sigmoid" else ""


def _is_one(w: Replacement, name: str) -> bool:
    """Whether this is a constant of one element that does not add axes to what it is combined with."""
    tensor, rank = w.context.tensors.get(name), shapes.rank(w.context.types, w.input(0))
    fits = tensor is not None and (not tensor.dims or (rank is not None and len(tensor.dims) < max(rank, 1)))
    return tensor is not None and fits and bool(np.array_equal(numpy_helper.to_array(tensor).reshape(-1), [1]))


def _logarithm(w: Replacement, x: str) -> str:
    """log s(x)."""
    tail = w("Log", w("Add", w("Exp", w("Neg", w("Abs", x))), w.constant(1.0)))
    return w("Sub", w("Min", x, w.constant(0.0)), tail)


def _reaches(
    node: onnx.NodeProto,
    readers: Mapping[str, list[onnx.NodeProto]],
    replacements: Written,
    reached: dict[str, bool],
) -> bool:
    """Whether a value that this node reads comes to a logarithm that is not yet exact."""
    if node.op_type == "Log" and not node.domain:
        return node.name not in replacements
    if node.op_type not in _PASSING or node.domain:
        return False
    if node.name not in reached:
        reached[node.name] = any(
            _reaches(reader, readers, replacements, reached) for reader in readers.get(node.output[0], [])
        )
    return reached[node.name]
