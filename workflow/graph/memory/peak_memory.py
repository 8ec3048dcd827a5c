"""Peak memory of a graph's values while it runs: bytes, the node at which it occurs, and the largest values. Pure.

A session holds each value from the node that produces it to its last reader (`sessions`); inputs and outputs are in
buffers of their own. The peak therefore follows from the order of the nodes and from the shapes, which the graph gives
in terms of its free axes.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import onnx
from onnx import TensorProto

from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.ir.edit import rename_values
from ortflow.workflow.graph.memory.arena import Arena
from ortflow.workflow.graph.memory.branches import branches_of

OWN = "ortflow"
"""Domain of our CPU operators."""
VIEWS = frozenset(["Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"])
"""Operators whose output shares the memory of their input."""
IN_PLACE = frozenset([
    "Cast", "Celu", "Clip", "Elu", "HardSigmoid", "LeakyRelu", "Relu", "Selu", "Sigmoid", "Softplus", "Softsign",
    "Tanh", "ThresholdedRelu",
])  # fmt: skip
"""ONNX operators whose output ONNX Runtime writes over their first input if it has no later reader; its kernels of
arithmetic, such as Add and Exp, do not.
"""
OWN_IN_PLACE: Mapping[str, int] = {
    "CrossEntropyGrad": 2, "GeluGrad": 0, "LayerNormalizationGrad": 0, "RMSNormalizationGrad": 0, "SoftmaxGrad": 0,
}  # fmt: skip
"""Our CPU operator -> the input that it may write over, as declared in its C file."""
READY = "ShardsReady"
"""Our GPU operator whose outputs share the memory of its inputs."""
EARLY = frozenset(["Shape", "Size"])
"""Operators that run as soon as their input is available."""
BYTES: Mapping[int, int] = {
    TensorProto.FLOAT: 4, TensorProto.DOUBLE: 8, TensorProto.FLOAT16: 2, TensorProto.BFLOAT16: 2, TensorProto.BOOL: 1,
    TensorProto.INT8: 1, TensorProto.UINT8: 1, TensorProto.INT16: 2, TensorProto.UINT16: 2, TensorProto.INT32: 4,
    TensorProto.UINT32: 4, TensorProto.INT64: 8, TensorProto.UINT64: 8,
}  # fmt: skip
"""Element type -> bytes per element."""
_OPERATIONS: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}  # fmt: skip


@dataclass(frozen=True)
class Peak:
    """The moment of peak memory."""

    size: int
    """Bytes alive at that moment."""
    held: int
    """Bytes that the session's arena takes from the system; more than `size` because of fragmentation."""
    node: str
    """The node that runs at that moment."""
    values: tuple[tuple[str, int], ...]
    """Name and bytes of the values alive at that moment, largest first."""
    unknown: tuple[str, ...]
    """Values of unknown size, which are counted as 0."""


def axes_of(graph: onnx.GraphProto, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Lengths of the graph's free axes by name, from the shapes of inputs."""
    lengths = {}
    for value in graph.input:
        dims = value.type.tensor_type.shape.dim
        for dim, size in zip(dims, shapes.get(value.name, ()), strict=False):
            if dim.dim_param:
                lengths[str(dim.dim_param)] = int(size)
    return lengths


def sizes_of(types: Mapping[str, tuple[int, Sequence[int]]]) -> dict[str, int]:
    """Bytes of every value, from element types and shapes."""
    return {name: math.prod(shape) * BYTES[kind] for name, (kind, shape) in types.items() if kind in BYTES}


def length(text: str, axes: Mapping[str, int]) -> int | None:
    """Length of an axis such as `batch*sequence`; None if unknown."""
    if text in axes:
        return axes[text]
    try:
        number = _value(ast.parse(text, mode="eval").body, axes)
        return math.floor(number) if math.isfinite(number) and number >= 0 else None
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return None


def _value(tree: ast.expr, axes: Mapping[str, int]) -> float:
    """Evaluate sums, products and floor() of numbers and axes. Raises ValueError for anything else."""
    match tree:
        case ast.Constant(value=int(number)):
            return number
        case ast.Name(id=name) if name in axes:
            return axes[name]
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _OPERATIONS:
            return _OPERATIONS[type(operation)](_value(left, axes), _value(right, axes))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, axes)
        case ast.Call(func=ast.Name(id="floor"), args=[inner], keywords=[]):
            return math.floor(_value(inner, axes))
    raise ValueError(ast.dump(tree))


@dataclass(frozen=True)
class Event:
    """A value's memory is allocated by a node, or freed after it."""

    name: str
    size: int
    node: str
    freed: bool = False


NO_CONDITIONS: Mapping[str, bool] = {}


def events(
    graph: onnx.GraphProto,
    sizes: Mapping[str, int],
    bound: Collection[str],
    persistent: Collection[str] = (),
    conditions: Mapping[str, bool] = NO_CONDITIONS,
) -> Iterator[Event]:
    """Each allocation and release while the nodes run in order.

    Parameters
    ----------
    graph
        Its nodes are sorted.
    sizes
        Bytes of each value; others count as 0.
    bound
        Values with memory of their own, which are left out.
    persistent
        Outputs that are allocated and not freed.
    conditions
        Of each If, where they are known. Of others the branch counts that needs more.
    """
    pinned = {*bound, *persistent}
    home = _homes(graph, sizes, pinned)
    last = _last_reads(graph, home)
    alive: set[str] = set()
    for place, node in enumerate(graph.node):
        label = str(node.name or node.op_type)
        if walk.is_if(node):
            inside = _of_branches(node, sizes, bound, conditions)
            alive.update(event.name for event in inside if event.name in node.output)
            yield from inside
        for name in filter(None, node.output):
            if home[name] == name and name not in bound and name not in alive:
                alive.add(name)
                yield Event(name, sizes.get(name, 0), label)
        touched = {home.get(name, name): None for name in (*walk.inputs(node), *filter(None, node.output))}
        for name in touched:
            if name in alive and name not in persistent and last.get(name, -1) <= place:
                alive.remove(name)
                yield Event(name, sizes.get(name, 0), label, freed=True)


def _of_branches(
    node: onnx.NodeProto, sizes: Mapping[str, int], bound: Collection[str], conditions: Mapping[str, bool]
) -> list[Event]:
    """Those of the branch of an If that is taken, or else of the one that needs more.

    Its results are allocated where the branch computes them, under the names that the If gives them.
    """
    branches = [_of_branch(node, branch, sizes, bound, conditions) for branch in branches_of(node, conditions)]
    return max(branches, key=_most, default=[])


def _of_branch(
    node: onnx.NodeProto,
    branch: onnx.GraphProto,
    sizes: Mapping[str, int],
    bound: Collection[str],
    conditions: Mapping[str, bool],
) -> list[Event]:
    inner_names = {str(name) for inner in branch.node for name in inner.output}
    results = {
        value.name: name for value, name in zip(branch.output, node.output, strict=False) if value.name in inner_names
    }
    for inner in branch.node:
        rename_values(inner, results)
    outputs = {name for name in results.values() if name not in bound}
    return list(events(branch, sizes, bound, outputs, conditions))


def _most(branch_events: Sequence[Event]) -> int:
    """The most bytes that are alive at once."""
    return max(accumulate(-event.size if event.freed else event.size for event in branch_events), default=0)


def peak_of(
    graph: onnx.GraphProto,
    sizes: Mapping[str, int],
    bound: Collection[str],
    conditions: Mapping[str, bool] = NO_CONDITIONS,
) -> Peak:
    """The memory peak when the nodes run in order; values in `bound` have memory of their own."""
    alive: dict[str, int] = {}
    arena, places = Arena(), dict[str, int]()
    now, best = 0, Peak(0, 0, "", (), ())
    for event in events(graph, sizes, bound, conditions=conditions):
        if event.freed:
            now -= alive.pop(event.name)
            arena.give(places.pop(event.name))
            continue
        alive[event.name] = event.size
        places[event.name] = arena.take(event.size)
        now += event.size
        if now > best.size:
            best = Peak(now, 0, event.node, tuple(alive.items()), ())
    values = sorted(best.values, key=lambda item: -item[1])
    return Peak(best.size, arena.reserved, best.node, tuple(values), unknown_of(graph, sizes, bound, conditions))


def unknown_of(
    graph: onnx.GraphProto,
    sizes: Mapping[str, int],
    bound: Collection[str],
    conditions: Mapping[str, bool] = NO_CONDITIONS,
) -> tuple[str, ...]:
    """Sorted names of the values of unknown size, without those in branches that are not taken."""
    return tuple(sorted(set(_made(graph.node, conditions)) - sizes.keys() - set(bound)))


def _made(nodes: Iterable[onnx.NodeProto], conditions: Mapping[str, bool]) -> Iterator[str]:
    for node in nodes:
        yield from filter(None, node.output)
        for branch in branches_of(node, conditions):
            yield from _made(branch.node, conditions)


def _homes(graph: onnx.GraphProto, sizes: Mapping[str, int], bound: Collection[str]) -> dict[str, str]:
    """Value -> the value whose memory it uses: itself, the one it is a view of, or the one it overwrites."""
    sources = {str(value.name) for value in (*graph.input, *graph.initializer)} | walk.captured(graph)
    last = _last_reads(graph, {})
    home: dict[str, str] = {}
    final: dict[str, int] = {}
    """Home -> the last read of any value in it."""
    for place, node in enumerate(graph.node):
        for name in filter(None, node.output):
            home[name] = name
            final[name] = last.get(name, place)
        if node.op_type == READY:
            for name, source in zip(node.output, node.input, strict=True):
                home[name] = home[source]
                final[home[name]] = max(final[home[name]], final[name])
            continue
        first = str(node.output[0]) if node.output else ""
        if not first or first in bound:
            continue
        source = None
        if node.op_type in VIEWS and not node.domain:
            source = str(node.input[0])
        elif candidates := _written_over(node):
            reusable = (
                name
                for name in candidates
                if name in home
                and home[name] not in bound
                and final.get(home[name]) == place
                and sizes.get(home[name]) == sizes.get(first)
            )
            source = next(reusable, None)
        if source is None:
            continue
        shared = home.get(source, source)
        if shared in sources or shared in bound or shared in home:
            home[first] = shared
            final[shared] = max(final.get(shared, place), final[first])
    return home


def _written_over(node: onnx.NodeProto) -> list[str]:
    """The inputs that a node may overwrite with its first output."""
    if not node.domain:
        # Measured on ONNX Runtime 1.19.2 and 1.32.0: with arithmetic in place, too, a peak was predicted 17% too small.
        return [str(node.input[0])] if node.op_type in IN_PLACE else []
    place = OWN_IN_PLACE.get(node.op_type) if node.domain == OWN else None
    return [str(node.input[place])] if place is not None and place < len(node.input) else []


def _last_reads(graph: onnx.GraphProto, home: Mapping[str, str]) -> dict[str, int]:
    """Value, or its home if it has one -> position of its last reader, or of its producer if there is none."""
    last_reads: dict[str, int] = {}
    for place, node in enumerate(graph.node):
        for name in filter(None, node.output):
            last_reads.setdefault(home.get(name, name), place)
        if node.op_type in EARLY and not node.domain:
            continue
        for name in walk.inputs(node):
            last_reads[home.get(name, name)] = place
    return last_reads
