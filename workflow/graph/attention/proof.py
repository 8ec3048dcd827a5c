"""Evaluates values that depend only on constants and input sizes, so that they are the same for every batch.

Called by `attention`, which must know whether a mask is causal, whichever nodes an exporter wrote to compute it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ortflow.workflow.graph.ir import shapes, walk
from ortflow.workflow.graph.ir.order import needed_by
from ortflow.workflow.graph.ir.replacement import attribute
from ortflow.workflow.graph.normalize.randomness import RANDOM

SMALL = (5, 8)
"""Two of these are tried for each dynamic size."""
LONGEST = 8192
"""A constant with at most so many positions is compared as a whole."""
_MOST = 1 << 27
"""Values with more elements are not evaluated."""
_FAULTS = (ArithmeticError, AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError)
"""Raised by the evaluation of nodes with contradictory attributes or sizes."""


class Proof:
    """The values of a graph's constant parts. In `types`, sizes that are always equal have one name."""

    def __init__(self, model: onnx.ModelProto, types: Mapping[str, onnx.TypeProto]) -> None:
        self._model, self._types = model, types
        self._makers = walk.producers(model.graph)
        self._tensors = {tensor.name: tensor for tensor in model.graph.initializer}
        self._constant: dict[str, bool] = {}
        self._numbers: dict[str, float | None] = {}

    def is_constant(self, name: str) -> bool:
        """Whether a value depends only on constants and on the sizes of values."""
        waiting = [name]
        while waiting:
            value = waiting[-1]
            if value in self._constant:
                waiting.pop()
                continue
            node = self._makers.get(value)
            if node is None or not self._is_computed(node):
                self._constant[value] = value in self._tensors or (node is not None and self._has_known_rank(node))
                continue
            before = [name_read for name_read in node.input if name_read]
            unknown = [name_read for name_read in before if name_read not in self._constant]
            if unknown:
                waiting += unknown
            else:
                self._constant[value] = all(self._constant[name_read] for name_read in before)
        return self._constant[name]

    def _is_computed(self, node: onnx.NodeProto) -> bool:
        """Whether the result depends on the values of the node's inputs."""
        if node.domain or node.op_type == "Shape" or node.op_type in RANDOM or node.op_type == "Dropout":
            return False
        return not any(True for _ in walk.subgraphs(node))

    def _has_known_rank(self, node: onnx.NodeProto) -> bool:
        """Whether a node computes the shape of a value whose sizes are all known by number or name."""
        if node.op_type != "Shape" or node.domain:
            return False
        return None not in (shapes.named_shape(self._types, node.input[0]) or [None])

    def number(self, name: str) -> float | None:
        """The number that all elements of a constant value equal, for all sizes; None if there is none."""
        if name not in self._numbers:
            self._numbers[name] = None
            dims = shapes.shape(self._types, name)
            if dims is not None and all(size == 1 for size in dims) and self.is_constant(name):
                values = {float(array.reshape(-1)[0]) for array in self.values(name)}
                self._numbers[name] = values.pop() if len(values) == 1 else None
        return self._numbers[name]

    def values(self, name: str, lengths: Collection[str] = ()) -> list[np.ndarray]:
        """Evaluate a constant value for several choices of the dynamic sizes; empty if it cannot be evaluated.

        `lengths` name the sizes that count tokens. They are also tried as large as the largest constant.
        """
        if name in self._tensors:
            return [numpy_helper.to_array(self._tensors[name])]
        nodes = [self._model.graph.node[place] for place in sorted(needed_by(self._model.graph.node, [name]))]
        nodes = self._without_what_shapes_read(nodes, name)
        read = {name_read for node in nodes for name_read in node.input}
        tensors = [tensor for tensor in self._model.graph.initializer if tensor.name in read]
        arrays = []
        for sizes in self._choices(nodes, tensors, lengths):
            array = self._evaluated(name, nodes, tensors, sizes)
            if array is None:
                return []
            arrays.append(array)
        return arrays

    def _without_what_shapes_read(self, nodes: Sequence[onnx.NodeProto], name: str) -> list[onnx.NodeProto]:
        needs, chain = {name}, []
        for node in reversed(nodes):
            if needs.intersection(node.output):
                chain.append(node)
                needs.update(() if node.op_type == "Shape" else node.input)
        return chain[::-1]

    def _choices(
        self, nodes: Sequence[onnx.NodeProto], tensors: Sequence[onnx.TensorProto], lengths: Collection[str]
    ) -> list[dict[str, int]]:
        """Choices of numbers for the dynamic sizes."""
        names: dict[str, None] = {}
        for node in nodes:
            if node.op_type == "Shape":
                for size in shapes.named_shape(self._types, node.input[0]) or ():
                    names.update((part, None) for part in _factors(size))
        if not names:
            return [{}]
        tried = [
            {name: length if name in lengths else place + 2 for place, name in enumerate(names)} for length in SMALL
        ]
        largest = max((size for tensor in tensors for size in tensor.dims), default=0)
        if max(SMALL) < largest <= LONGEST:
            tried.append({name: largest if name in lengths else 1 for name in names})
        return tried

    def _evaluated(
        self,
        name: str,
        nodes: Sequence[onnx.NodeProto],
        tensors: Sequence[onnx.TensorProto],
        sizes: Mapping[str, int],
    ) -> np.ndarray | None:
        from onnx.reference import ReferenceEvaluator

        constants, chain = list(tensors), []
        for node in nodes:
            if node.op_type != "Shape":
                chain.append(node)
                continue
            dims = [_product(size, sizes) for size in shapes.named_shape(self._types, node.input[0]) or ()]
            dims = dims[attribute(node, "start", 0) : attribute(node, "end", None)]
            constants.append(numpy_helper.from_array(np.array(dims, np.int64), node.output[0]))
        result = helper.make_value_info(name, onnx.TypeProto())
        graph = helper.make_graph(chain, "proof", [], [result], constants)
        model = helper.make_model(graph, opset_imports=self._model.opset_import)
        try:
            (array,) = ReferenceEvaluator(model).run([name], {})
        except _FAULTS:
            return None
        return np.asarray(array) if np.size(array) <= _MOST else None


def _factors(size: int | str | None) -> list[str]:
    """The names in a size, which may be a product of names and numbers: `4*batch`."""
    return [part for part in size.split("*") if not part.isdigit()] if isinstance(size, str) else []


def _product(size: int | str | None, sizes: Mapping[str, int]) -> int:
    if not isinstance(size, str):
        return size or 0
    return math.prod(int(part) if part.isdigit() else sizes[part] for part in size.split("*"))


def is_floating(types: Mapping[str, onnx.TypeProto], name: str) -> bool:
    """Whether a value is known to be fp32."""
    return bool(shapes.element_type(types, name) == TensorProto.FLOAT)
