"""Finds the facts about a graph that a division needs, in two trials with different sizes of its dynamic axes."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

import onnx

from ortflow.workflow.graph.autodiff.path import gradient_path
from ortflow.workflow.graph.ir import shapes
from ortflow.workflow.graph.ir.edit import dims_of
from ortflow.workflow.graph.memory.concrete import followed
from ortflow.workflow.graph.rules.facts import Facts, Trials

_FIRST, _SECOND = (11, 7, 13, 17, 19), (29, 5, 23, 31, 37)
"""Sizes for dynamic axes in the trials: those of the first, second, … axis of every input."""


def facts_of(
    model: onnx.ModelProto, tensors: Mapping[str, Sequence[int]], trained: Collection[str], loss: str
) -> Facts:
    """Facts about a model with sorted nodes; `tensors` has the shapes of its weights, of which `trained` train."""
    graph = model.graph
    first, values = followed(model, _batch(graph, _FIRST))
    second, _ = followed(model, _batch(graph, _SECOND))
    trained_weights = [name for name in trained if name in tensors]
    types = shapes.value_types(model)
    path = gradient_path(graph, types, trained_weights, [loss]).values if trained_weights else frozenset[str]()
    return Facts(graph, tensors, Trials(first, second, values), path)


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
