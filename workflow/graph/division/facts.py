"""Facts about a graph for the search: sizes, constants, producers and readers of values, trained inputs."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import onnx
from onnx import numpy_helper

from ortflow.workflow.graph.autodiff.path import gradient_path
from ortflow.workflow.graph.ir import shapes, walk
from ortflow.workflow.graph.ir.edit import dims_of
from ortflow.workflow.graph.memory.concrete import followed

_FIRST, _SECOND = (11, 7, 13, 17, 19), (29, 5, 23, 31, 37)
"""Sizes for dynamic axes in the trials: those of the first, second, … axis of every input."""
_SMALL = 1 << 16
"""Largest number of elements of a constant that may be cut."""


class Facts:
    """Facts about a graph with sorted nodes. Dynamic axes are recognised by two trials with different sizes."""

    def __init__(
        self, model: onnx.ModelProto, tensors: Mapping[str, Sequence[int]], trained: Collection[str], loss: str
    ) -> None:
        graph = model.graph
        self.nodes = list(graph.node)
        self.tensors = {name: tuple(shape) for name, shape in tensors.items()}
        self.outputs = {value.name for value in graph.output}
        self.makers: dict[str, int] = {}
        self.readers: dict[str, list[tuple[int, int]]] = {}
        """Value -> indices of the nodes that read it, each with the index of the input (-1: read by a subgraph)."""
        for place, node in enumerate(self.nodes):
            for name in node.output:
                if name:
                    self.makers[name] = place
            for slot, name in enumerate(node.input):
                if name:
                    self.readers.setdefault(name, []).append((place, slot))
            for inner in walk.subgraphs(node):
                for name in walk.captured(inner):
                    self.readers.setdefault(name, []).append((place, -1))
        self._types, self._values = followed(model, _batch(graph, _FIRST))
        self._others, _ = followed(model, _batch(graph, _SECOND))
        self.constants = {
            tensor.name: tensor for tensor in graph.initializer if np.prod(tensor.dims, dtype=np.int64) <= _SMALL
        }
        self.inputs = {value.name for value in graph.input} - self.tensors.keys()
        types = shapes.value_types(model)
        trained = [name for name in trained if name in self.tensors]
        self.trained = gradient_path(graph, types, trained, [loss]).values if trained else frozenset[str]()

    def shape(self, value: str) -> tuple[int, ...] | None:
        """Shape in the first trial; None if unknown."""
        if value in self.tensors:
            return self.tensors[value]
        trial_shapes = self._types.get(value)
        return None if trial_shapes is None else trial_shapes[1]

    def pair(self, value: str) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Shapes in both trials; None if unknown."""
        first, other = self.shape(value), self._others.get(value)
        second = self.tensors.get(value) if other is None else other[1]
        return None if first is None or second is None or len(first) != len(second) else (first, second)

    def size(self, value: str, axis: int) -> int | None:
        """Size of an axis that never varies; None if it varies or is unknown."""
        first = self.shape(value)
        if value in self.tensors:
            return None if first is None else first[axis]
        other = self._others.get(value)
        if first is None or other is None or len(first) != len(other[1]):
            return None
        return first[axis] if first[axis] == other[1][axis] else None

    def value(self, name: str) -> np.ndarray | None:
        """Content of a value in the first trial: a constant's elements, or sizes that nodes compute."""
        if name in self._values:
            return self._values[name]
        return self.constant(name)

    def constant(self, name: str) -> np.ndarray | None:
        """The elements of a small constant; None for other values."""
        tensor = self.constants.get(name)
        return None if tensor is None or name in self.tensors else numpy_helper.to_array(tensor)


def _batch(graph: onnx.GraphProto, lengths: Sequence[int]) -> dict[str, list[int]]:
    """A shape for each input whose shape varies."""
    shapes = {}
    for value in graph.input:
        dims = dims_of(value)
        if dims is not None and not all(isinstance(size, int) for size in dims):
            shapes[value.name] = [
                size if isinstance(size, int) else _length(size, lengths[min(axis, len(lengths) - 1)])
                for axis, size in enumerate(dims)
            ]
    return shapes


def _length(name: str | None, length: int) -> int:
    """Size of a dynamic axis in a trial; a multiple if the axis is declared as the multiple of a number."""
    multiple = re.fullmatch(r"(\d+)\*\w+", name or "")
    return length * int(multiple[1]) if multiple else length
