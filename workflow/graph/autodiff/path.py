"""Determines which nodes must be differentiated: those between a trained parameter and the loss.

Called by `expand` and `autodiff.reverse`. Only floating-point values carry gradients. Some inputs (limits, ratios,
sizes) never do, and none passes a mark of `stops`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import onnx
from onnx import TensorProto

from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.ir.stops import stops_gradient

# Floating-point inputs that carry no gradient.
_STOPS: dict[str, Collection[int]] = {
    "BatchNormalization": (3, 4),
    "Clip": (1, 2),
    "Dropout": (1, 2),
    "EyeLike": (0,),
    "OneHot": (0, 1, 2),
    "Pad": (1, 2, 3),
    "Range": (0, 1, 2),
    "Resize": (1, 2, 3),
    "STFT": (1, 3),
    "SoftmaxCrossEntropyLoss": (1, 2),
}
# onnx leaves the types behind other domains' operators undefined: such values may be real.
_FLOATING = (TensorProto.UNDEFINED, TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)


@dataclass(frozen=True)
class Path:
    """The part of a graph between the trained parameters and the loss."""

    values: frozenset[str]
    """Values that depend on a trained parameter and that the loss depends on, both differentiably."""
    nodes: frozenset[int]
    """Positions of the nodes of that part in the main graph."""
    reached: frozenset[str]
    """Trained parameters that the loss depends on."""


def gradient_path(
    graph: onnx.GraphProto, types: Mapping[str, onnx.TypeProto], trained: Collection[str], loss: Collection[str]
) -> Path:
    """The part of a sorted graph that is differentiated for `loss` (several outputs if the loss is not known yet)."""
    # Few values are integers, and each is asked about by its maker and by its readers.
    others = {name for name, value_type in types.items() if value_type.tensor_type.elem_type not in _FLOATING}
    edges = [_floating_edges(node, others) for node in graph.node]
    forward = set(trained)
    for sources, results in edges:
        if forward.intersection(sources):
            forward.update(results)
    backward = set(loss)
    on_path = set()
    for place in range(len(graph.node) - 1, -1, -1):
        sources, results = edges[place]
        if backward.intersection(results):
            backward.update(sources)
            if forward.intersection(sources):
                on_path.add(place)
    values = frozenset(forward & backward)
    return Path(values, frozenset(on_path), values.intersection(trained))


def _floating_edges(node: onnx.NodeProto, others: Collection[str]) -> tuple[set[str], set[str]]:
    """What a node reads and makes, without the values `others`, which are not floating-point ones."""
    if stops_gradient(node):
        return set(), set()
    stops = _STOPS.get(node.op_type)
    if stops is None and not node.attribute:
        sources = walk.inputs(node)
    else:
        sources = {name for place, name in enumerate(node.input) if name and place not in (stops or ())}
        for graph in walk.subgraphs(node):
            sources |= walk.captured(graph)
    results = set(node.output)
    results.discard("")
    sources.difference_update(others)
    results.difference_update(others)
    return sources, results
