"""Replaces EmbeddingBag, which TorchScript's exporter writes as a Loop over the bags, by operators without a loop.

Called by `prepare` for every graph: a table inside a loop is not recognised as a parameter, and ONNX Runtime
differentiates no Loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.ir.edit import replace
from ortflow.workflow.graph.ir.replacement import Context, Replacement, attribute, context_of

_LOWEST = float(np.finfo(np.float32).min)


@dataclass(frozen=True)
class _Bag:
    """What the loop's body computes for bag i: a reduction of table[indices[starts[i]:ends[i]]]."""

    reduction: str
    table: str
    indices: str
    starts: str
    ends: str
    weights: str
    """Weights of the rows; empty if there are none."""


def replace_bags(model: onnx.ModelProto) -> list[str]:
    """Rewrites each such Loop of the main graph, in place; returns log lines."""
    if not any(node.op_type == "Loop" for node in model.graph.node):
        return []
    context = context_of(model)
    bags = [_bag(node, context.tensors) for node in model.graph.node]
    count = sum(bag is not None for bag in bags)
    nodes: list[onnx.NodeProto] = []
    for node, bag in zip(model.graph.node, bags, strict=True):
        nodes += [node] if bag is None else _without_loop(node, bag, context)
    replace(model.graph.node, nodes)
    return [f"{count} EmbeddingBag written without {'its loop' if count == 1 else 'their loops'}"]


def _without_loop(node: onnx.NodeProto, bag: _Bag, context: Context) -> list[onnx.NodeProto]:
    """Uses a matrix [bags, indices] that marks which index is in which bag. Empty bags are 0, as in PyTorch."""
    w = Replacement(node, context)
    rows = w("Gather", bag.table, bag.indices, axis=0)
    if bag.weights:
        rows = w("Mul", rows, w("Unsqueeze", bag.weights, w.ints(1)))
    count = w("Squeeze", w("Shape", bag.indices))
    places = w("Range", w.constant(0, np.int64), count, w.constant(1, np.int64))
    bags = w("Reshape", w.input(0), w.ints(1))
    starts, ends = (
        w("Unsqueeze", w("Slice", name, w.ints(0), bags, w.ints(0)), w.ints(1)) for name in (bag.starts, bag.ends)
    )
    inside = w("And", w("GreaterOrEqual", places, starts), w("Less", places, ends))
    if bag.reduction == "ReduceMax":
        masked = w("Where", w("Unsqueeze", inside, w.ints(2)), rows, w.constant(_LOWEST))
        filled = w("Less", starts, ends)
        return w.done(w("Where", filled, w("ReduceMax", masked, w.ints(1), keepdims=0), w.constant(0.0)))
    share = w("Cast", inside, to=TensorProto.FLOAT)
    if bag.reduction == "ReduceMean":
        length = w("Max", w("Sub", ends, starts), w.constant(1, np.int64))
        share = w("Div", share, w("Cast", length, to=TensorProto.FLOAT))
    return w.done(w("MatMul", share, rows))


def _bag(node: onnx.NodeProto, tensors: Mapping[str, onnx.TensorProto]) -> _Bag | None:
    """The bag reduction that a Loop computes; None if it computes something else."""
    if node.op_type != "Loop" or node.domain != "" or len(node.input) != 2 or len(node.output) != 1:
        return None
    body = next(iter(walk.subgraphs(node)))
    inner = {
        n.output[0]: n.attribute[0].t for n in body.node if n.op_type == "Constant" and n.attribute[0].HasField("t")
    }
    loop_body = _Body(walk.producers(body), {**tensors, **inner}, body.input[0].name)
    try:
        return loop_body.bag(body.output[1].name)
    except (KeyError, IndexError):
        return None


@dataclass(frozen=True)
class _Body:
    """The body of a loop. Its methods raise KeyError if a value is computed in another way than they expect."""

    producers: Mapping[str, onnx.NodeProto]
    constants: Mapping[str, onnx.TensorProto]
    iteration: str

    def bag(self, result: str) -> _Bag:
        reduction = self.producers[result]
        if reduction.op_type not in ("ReduceSum", "ReduceMean", "ReduceMax") or attribute(reduction, "keepdims", 1):
            raise KeyError(result)
        self._expect(reduction.input[1], 0)
        rows, weights = self.producers[reduction.input[0]], ""
        if rows.op_type == "Mul":
            factors = self._node(rows.input[1], "Unsqueeze")
            self._expect(factors.input[1], 1)
            rows, weights = self.producers[rows.input[0]], factors.input[0]
        if rows.op_type != "Gather" or attribute(rows, "axis", 0) or rows.input[0] in self.producers:
            raise KeyError(result)
        indices, starts, ends = self._part(rows.input[1])
        if weights:
            weights, *bounds = self._part(weights)
            if bounds != [starts, ends]:
                raise KeyError(result)
        return _Bag(reduction.op_type, rows.input[0], indices, starts, ends, weights)

    def _part(self, name: str) -> tuple[str, str, str]:
        """The names of `values`, `starts` and `ends` in `values[starts[i]:ends[i]]`."""
        part = self._node(name, "Slice")
        self._expect(part.input[3], 0)
        return part.input[0], self._of_iteration(part.input[1]), self._of_iteration(part.input[2])

    def _of_iteration(self, name: str) -> str:
        gather = self._node(self._node(name, "Unsqueeze").input[0], "Gather")
        if gather.input[1] != self.iteration or gather.input[0] in self.producers:
            raise KeyError(name)
        return str(gather.input[0])

    def _node(self, name: str, op_type: str) -> onnx.NodeProto:
        node = self.producers[name]
        if node.op_type != op_type:
            raise KeyError(name)
        return node

    def _expect(self, name: str, value: int) -> None:
        if numpy_helper.to_array(self.constants[name]).tolist() != [value]:
            raise KeyError(name)
