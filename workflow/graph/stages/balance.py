"""Finds cuts for which the stages take about equal time and send little. Pure.

Nodes stay in the order of the graph, so that a cut is a position in it: an optimal partition of a chain by dynamic
programming, as in PipeDream (Narayanan et al. 2019), over the positions that the fewest bytes cross.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import onnx

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.ir.edit import dims_of
from ortflow.workflow.graph.ir.order import needed_by
from ortflow.workflow.graph.stages.costs import Costs
from ortflow.workflow.graph.stages.cut import STATISTIC, free_nodes

PER_BYTE = 20
"""Operations that a processor performs while one byte is sent: an estimate for CPU ranks on one machine."""
PER_BYTE_ON_GPUS = 2_000
"""The same for GPUs: an estimate for half precision and NVLink, where half of a message passes beside other work."""
IN_MACHINE, BETWEEN_MACHINES = 1.5e9, 1.25e9
"""Bytes a second between two ranks: an assumption for MPI through shared memory, and 10 Gbit/s."""
SECONDS_PER_BYTE = 1 / BETWEEN_MACHINES
"""Seconds in which one byte is sent, beside measured seconds of nodes. The slower of two similar rates, so that the
cuts do not depend on where the ranks of a restart are.
"""
MESSAGE = 10_000
"""Bytes that a message counts as in addition to its content, for its latency."""
OTHER = 128
"""Size of the dynamic axes of samples that is assumed if it is unknown."""
_PLACES = 50
"""Positions considered per stage."""


_Way = tuple[tuple[float, int], tuple[int, ...]]
"""Slowest stage and bytes of a way to cut a part of the graph, and the ends of its stages."""


@dataclass(frozen=True)
class Place:
    """A possible cut: after a node."""

    node: int
    work: float
    """Operations of all nodes up to here."""
    bytes: int
    """Bytes of all values that cross, including the latency of their messages."""
    names: tuple[str, ...]
    """Values that cross, in the order of computation."""


def sizes_of(graph: onnx.GraphProto, weights: Collection[str], rows: int, length: int) -> dict[str, int]:
    """Axis name -> size: `rows` for the first axis of the batch's inputs, `length` for the others."""
    sizes: dict[str, int] = {}
    for value in graph.input:
        dims = dims_of(value) if value.name not in weights else None
        for place, dim in enumerate(dims or ()):
            if isinstance(dim, str):
                sizes.setdefault(dim, length if place else rows)
    return sizes


def shapes_of(graph: onnx.GraphProto, weights: Collection[str], rows: int, length: int) -> dict[str, list[int]]:
    """Shapes of the batch's inputs: `rows` for a free first axis, `length` for the others."""
    batch_shapes = {}
    for value in graph.input:
        dims = dims_of(value) if value.name not in weights else None
        if dims is not None:
            lengths = [rows, *[length] * len(dims)]
            batch_shapes[str(value.name)] = [
                dim if isinstance(dim, int) else lengths[place] for place, dim in enumerate(dims)
            ]
    return batch_shapes


def balanced_cuts(
    model: onnx.ModelProto,
    stages: int,
    weights: Collection[str],
    costs: Costs,
    *,
    allowed: Collection[str] | None = None,
    seconds: Callable[[onnx.NodeProto], float] | None = None,
    per_byte: float = PER_BYTE,
) -> list[list[str]]:
    """Find cuts of a forward graph with its loss that make the slowest stage as fast as possible.

    Parameters
    ----------
    model
        Its nodes are sorted.
    stages
        At least 2.
    weights
        Inputs that are parameters or running statistics.
    costs
        Of its nodes and values.
    allowed
        Values at which the graph may be cut; all if None.
    seconds
        Measured cost of a node; by default its counted operations. `per_byte` has the same unit.

    Raises
    ------
    UserError
        If the graph cannot be cut into so many stages.
    """
    places = _thinned(_places(model.graph, weights, costs, allowed, seconds or costs.operations), stages * _PLACES)
    total = places.pop().work if places else 0.0
    if len(places) < stages - 1:
        raise UserError(
            f"the model can be cut into {len(places) + 1} stages at most, and {stages} are wanted",
            where="parallel.pipeline",
            fix="use fewer stages",
        )
    cut_places = _partition(places, total, stages, per_byte)
    cuts: list[list[str]] = []
    names_cut: set[str] = set()
    for place in cut_places:
        cuts.append([name for name in place.names if name not in names_cut])
        names_cut.update(place.names)
    return cuts


def _places(
    graph: onnx.GraphProto,
    weights: Collection[str],
    costs: Costs,
    allowed: Collection[str] | None,
    work_of: Callable[[onnx.NodeProto], float],
) -> list[Place]:
    """Each possible cut, and the end of the graph as the last."""
    unbound = free_nodes(graph, weights)
    to_loss = needed_by(graph.node, [v.name for v in graph.output if not v.name.endswith(STATISTIC)])
    nodes = [place for place in sorted(to_loss) if place not in unbound]
    last_read: dict[str, int] = {}
    for place in nodes:
        last_read.update(dict.fromkeys(walk.inputs(graph.node[place]), place))
    crossing: dict[str, int] = {}
    work, candidates = 0.0, list[Place]()
    for place in nodes:
        node = graph.node[place]
        work += work_of(node)
        new = [name for name in node.output if last_read.get(name, -1) > place]
        crossing = {name: size for name, size in crossing.items() if last_read[name] > place}
        crossing.update((name, costs.bytes(name)) for name in new)
        names_new = any(name in crossing for name in node.output)
        if names_new and (allowed is None or all(name in allowed for name in crossing)):
            candidates.append(Place(place, work, sum(crossing.values()) + MESSAGE * len(crossing), tuple(crossing)))
    return [*candidates, Place(len(graph.node), work, 0, ())]


def _thinned(places: list[Place], most: int) -> list[Place]:
    """Of positions with similar work before them, the one that the fewest bytes cross. The last position stays."""
    *inner, end = places
    best: dict[int, Place] = {}
    for place in inner:
        bucket = int(place.work / end.work * most) if end.work else 0
        if bucket not in best or place.bytes < best[bucket].bytes:
            best[bucket] = place
    few = list(best.values())
    return [*(few if len(few) >= most // _PLACES - 1 else inner), end]


def _partition(places: Sequence[Place], total: float, stages: int, per_byte: float) -> list[Place]:
    """The cuts with the smallest maximum over the stages of work and transfers.

    Of equal ones, those whose first stages have the smaller maximum, then those that fewer bytes cross.
    The backward pass costs twice the forward pass. A value that crosses is sent forward once, and its gradient back.
    """
    starts = [0.0, *(place.work for place in places)]
    inward = [0, *(place.bytes for place in places)]
    ends = [*starts[1:], total]
    outward = [*inward[1:], 0]

    def cost(start: int, end: int) -> float:
        """Cost of a stage from after position `start - 1` to position `end`, including the transfers at both ends."""
        return 3 * (ends[end] - starts[start]) + 2 * per_byte * (inward[start] + outward[end])

    count = len(places)
    best: dict[int, _Way] = {end: ((cost(0, end), outward[end]), (end,)) for end in range(count + 1)}
    for _ in range(stages - 1):
        longer: dict[int, _Way] = {}
        for end in range(count + 1):
            for before in [position for position in best if position < end]:
                (slowest, sent), path = best[before]
                key = (max(slowest, cost(before + 1, end)), sent + outward[end])
                if end not in longer or key < longer[end][0]:
                    longer[end] = key, (*path, end)
        best = longer
    return [places[end] for end in best[count][1][:-1]]
