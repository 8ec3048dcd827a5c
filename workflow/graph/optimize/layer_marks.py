"""Marks the layers of a forward graph, for `recompute`: those that repeat, or those that end with given tensors.

Called by `assembly` on the graph in training mode with its loss, before it is cut, divided or differentiated. A mark is
metadata of a node. Nodes that replace a marked one inherit it.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from typing import Literal

import onnx

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.ir import shapes
from ortflow.workflow.graph.ir.order import needed_by
from ortflow.workflow.graph.ir.origin import LAYER
from ortflow.workflow.graph.optimize.repeats import repeated
from ortflow.workflow.graph.optimize.trunk import Segment, trunks_of

WHERE = "model.recompute"
_MORE = 1.25
"""Values that layers share are left out of account if layers then cover so much more of the graph."""
_SHOWN = 3


def mark_layers(
    model: onnx.ModelProto, setting: Literal["layers"] | Sequence[Sequence[str]], trained: Collection[str], loss: str
) -> list[str]:
    """Mark the layers of `model.recompute`, in place; returns log lines.

    Raises
    ------
    UserError
        If there are no such layers.
    """
    if setting == "layers":
        return _mark_repeats(model, trained, loss)
    _mark_named(model.graph, setting)
    return []


def _mark_repeats(model: onnx.ModelProto, trained: Collection[str], loss: str) -> list[str]:
    """Mark the layers that the graph repeats, in place; returns a log line with the tensors that they end with.

    Raises
    ------
    UserError
        If nothing repeats.
    """
    graph = model.graph
    layers: list[list[Segment]] = []
    for segments in trunks_of(graph, shapes.value_types(model), trained, loss):
        spans = repeated([segment.kind for segment in segments], [len(segment.places) for segment in segments])
        repeats = [segments[slice(*span)] for span in spans]
        if _size(repeats) > _MORE * _size(layers):
            layers = repeats
    if not layers:
        raise UserError(
            "is layers, and no layers repeat in the graph between places that a single activation crosses",
            where=WHERE,
            fix="name modules, or the tensors that the layers end with",
        )
    for number, layer in enumerate(layers):
        _mark(graph, [place for segment in layer for place in segment.places], number)
    ends = [layer[-1].end for layer in layers]
    rest = f" and {len(ends) - _SHOWN} more" if len(ends) > _SHOWN else ""
    return [f"{len(ends)} layers found for recomputation, which end with {', '.join(ends[:_SHOWN])}{rest}"]


def _mark_named(graph: onnx.GraphProto, ends: Sequence[Sequence[str]]) -> None:
    """Mark the layers that end with the given tensors, one list per layer, in place.

    A layer is everything that its tensors are computed from and that is in no earlier layer.

    Raises
    ------
    UserError
        If a tensor does not exist, or a layer would be empty.
    """
    makers = {name: place for place, node in enumerate(graph.node) for name in node.output if name}
    before: set[int] = set()
    for number, names in enumerate(ends):
        if not names:
            raise UserError(
                "the layer names no tensor", where=f"{WHERE}[{number}]", fix="name the tensors it ends with"
            )
        for place, name in enumerate(names):
            if name not in makers:
                close = difflib.get_close_matches(name, sorted(makers), 3)
                hint = f"did you mean {' or '.join(map(repr, close))}?" if close else "`ortflow inspect` lists tensors"
                raise UserError(
                    f"no node of the model computes {name!r}", where=f"{WHERE}[{number}][{place}]", fix=hint
                )
        places = needed_by(graph.node, names) - before
        if not places:
            raise UserError(
                f"the layer that ends with {', '.join(map(repr, names))} has no node of its own",
                where=f"{WHERE}[{number}]",
                fix="list the layers in the order in which the model computes them, each with at least one tensor",
            )
        _mark(graph, sorted(places), number)
        before |= places


def layer_of(node: onnx.NodeProto) -> str | None:
    """A node's mark."""
    return next((prop.value for prop in node.metadata_props if prop.key == LAYER), None)


def _mark(graph: onnx.GraphProto, places: Sequence[int], number: int) -> None:
    for place in places:
        graph.node[place].metadata_props.add(key=LAYER, value=str(number))


def _size(layers: Sequence[Sequence[Segment]]) -> int:
    return sum(len(segment.places) for layer in layers for segment in layer)
