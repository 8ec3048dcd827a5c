"""What rules of a division know of a graph: sizes, constants, producers and readers of values, trained inputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import numpy_helper

from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.rules.size import Type

_SMALL = 1 << 16
"""Largest number of elements of a constant that may be cut."""


@dataclass(frozen=True)
class Trials:
    """What inference finds in a graph for two batches whose dynamic axes have different sizes."""

    first: Mapping[str, Type]
    second: Mapping[str, Type]
    values: Mapping[str, np.ndarray]
    """Sizes that nodes compute in the first trial, and what is computed of them."""


class Facts:
    """Facts about a graph with sorted nodes. Dynamic axes are those whose sizes differ between the trials.

    Parameters
    ----------
    graph
        The graph.
    tensors
        Shapes of the parameters and other weights, which are inputs of the graph.
    trials
        Types of its values.
    trained
        Values between trained parameters and the loss.
    """

    def __init__(
        self, graph: onnx.GraphProto, tensors: Mapping[str, Sequence[int]], trials: Trials, trained: Collection[str]
    ) -> None:
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
        self._trials, self.trained = trials, trained
        self.constants = {
            tensor.name: tensor for tensor in graph.initializer if np.prod(tensor.dims, dtype=np.int64) <= _SMALL
        }
        self.inputs = {value.name for value in graph.input} - self.tensors.keys()

    def shape(self, value: str) -> tuple[int, ...] | None:
        """Shape in the first trial; None if unknown."""
        if value in self.tensors:
            return self.tensors[value]
        trial_shapes = self._trials.first.get(value)
        return None if trial_shapes is None else trial_shapes[1]

    def pair(self, value: str) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Shapes in both trials; None if unknown."""
        first, other = self.shape(value), self._trials.second.get(value)
        second = self.tensors.get(value) if other is None else other[1]
        return None if first is None or second is None or len(first) != len(second) else (first, second)

    def size(self, value: str, axis: int) -> int | None:
        """Size of an axis that never varies; None if it varies or is unknown."""
        first = self.shape(value)
        if value in self.tensors:
            return None if first is None else first[axis]
        other = self._trials.second.get(value)
        if first is None or other is None or len(first) != len(other[1]):
            return None
        return first[axis] if first[axis] == other[1][axis] else None

    def value(self, name: str) -> np.ndarray | None:
        """Content of a value in the first trial: a constant's elements, or sizes that nodes compute."""
        if name in self._trials.values:
            return self._trials.values[name]
        return self.constant(name)

    def constant(self, name: str) -> np.ndarray | None:
        """The elements of a small constant; None for other values."""
        tensor = self.constants.get(name)
        return None if tensor is None or name in self.tensors else numpy_helper.to_array(tensor)
