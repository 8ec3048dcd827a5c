"""When a graph needs which parameters: uses close to each other form one visit, with a single fetch.

Pure. A value computed from parameters alone, such as a transposed weight, counts as a use where it is read. It is
computed again for each visit, because storing it would mean storing the parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import onnx

from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.ir.order import needed_by
from ortflow.workflow.graph.shards.layer_groups import Layer
from ortflow.workflow.graph.shards.program import GRADIENT

APART = 2
"""Number of visits to other layers that begin between two uses of a layer in one pass, from which on the layer is
fetched again.
"""
_DRAWS = frozenset(
    {"Bernoulli", "Dropout", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)

Derived = Mapping[str, tuple[onnx.NodeProto, tuple[str, ...]]]
"""Value -> the node that computes it, and the parameters that it is computed from."""


@dataclass(eq=False)
class Visit:
    """Uses of a layer that one fetch serves."""

    first: int
    """Index of the node that uses it first."""
    backward: bool
    tensors: dict[str, None] = field(default_factory=dict)
    seen: int = 0
    """Number of visits that had begun at the last use."""
    number: int = -1
    """Index of its fetch in the program; -1 until it has one."""


def derived_nodes(graph: onnx.GraphProto, parameters: Collection[str]) -> Derived:
    """Values that are computed from parameters and constants alone, and are not outputs of the graph."""
    outputs = {value.name for value in graph.output}
    constants = {tensor.name for tensor in graph.initializer}
    derived: dict[str, tuple[onnx.NodeProto, tuple[str, ...]]] = {}
    for node in graph.node:
        read = [name for name in node.input if name]
        if node.op_type in _DRAWS or list(walk.subgraphs(node)) or outputs.intersection(node.output) or not read:
            continue
        if not all(name in parameters or name in derived or name in constants for name in read):
            continue
        of = dict.fromkeys(parameter for name in read for parameter in _of(name, parameters, derived))
        if of:
            derived.update((name, (node, tuple(of))) for name in node.output if name)
    return derived


def _of(name: str, parameters: Collection[str], derived: Derived) -> tuple[str, ...]:
    return (name,) if name in parameters else derived[name][1] if name in derived else ()


def visits_of(graph: onnx.GraphProto, layers: Sequence[Layer], derived: Derived) -> dict[int, dict[str, Visit]]:
    """Index of a node -> the visit that serves each parameter it uses; nodes without parameters are left out."""
    nodes = list(graph.node)
    forward = needed_by(nodes, [value.name for value in graph.output if not value.name.endswith(GRADIENT)])
    homes = {name: number for number, layer in enumerate(layers) for name in layer.tensors}
    current: dict[int, Visit] = {}
    served: dict[int, dict[str, Visit]] = {}
    begun = 0
    for place, node in enumerate(nodes):
        if node.output[0] in derived:
            continue
        used = dict.fromkeys(parameter for name in sorted(walk.inputs(node)) for parameter in _of(name, homes, derived))
        for name in used:
            visit, backward = current.get(homes[name]), place not in forward
            visits_between = 0 if visit is None else begun - visit.seen
            if visit is None or visits_between >= APART or (visits_between and backward != visit.backward):
                visit = current[homes[name]] = Visit(place, backward)
                begun += 1
            visit.tensors[name] = None
            visit.seen = begun
            served.setdefault(place, {})[name] = visit
    return served
