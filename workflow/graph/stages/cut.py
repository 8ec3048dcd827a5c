"""Assigns the nodes of a forward graph to stages, given the tensors at which it is cut. Pure.

A stage computes what the tensors of its cut depend on and no earlier stage has computed; the last stage computes the
rest. Two kinds of nodes differ. Nodes that depend on weights alone, or on the batch alone, are computed again in each
stage that reads them if that is cheap: a transposed embedding, a mask. Nodes that the loss does not depend on (running
statistics) are computed as early as possible.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import onnx

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.domains import CPU_DOMAIN
from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.ir.order import needed_by
from ortflow.workflow.graph.operators.families import Trait, having

WHERE = "parallel.cuts"
HEAVY = having(Trait.HEAVY)
"""Operators that are computed once."""
DRAWING = frozenset({"Bernoulli", "Dropout", "Multinomial"})
"""Operators that draw from ONNX Runtime's generator: a second run would draw other numbers."""
STATISTIC = "_new"
"""Suffix of outputs that are running statistics after the batch."""


@dataclass(frozen=True)
class Assignment:
    """The nodes of a graph by stage."""

    stages: Sequence[Collection[int]]
    """For each stage the indices of its nodes; a node may be in several."""
    makers: dict[str, int]
    """Value -> the stage that computes it for others. Values that each stage computes for itself are missing."""


def assign(graph: onnx.GraphProto, cuts: Sequence[Sequence[str]], weights: Collection[str]) -> Assignment:
    """Assign the nodes of a sorted graph to one stage more than there are cuts.

    Parameters
    ----------
    graph
        Its outputs are those of the loss, or others that the last stage makes, and running statistics `<name>_new`.
    cuts
        Tensors by cut, in the order of the stages.
    weights
        Inputs that are parameters or running statistics; the other inputs are the batch.

    Raises
    ------
    UserError
        If a cut names what it cannot, or does not separate two stages.
    """
    nodes = graph.node
    _check_names(graph, cuts, weights)
    main = [value.name for value in graph.output if not value.name.endswith(STATISTIC)]
    to_loss = needed_by(nodes, main)
    unbound = free_nodes(graph, weights)
    last = len(cuts)
    home: dict[int, int] = {}
    for number, cut in enumerate(cuts):
        behind = {place for place in needed_by(nodes, cut) if place not in unbound}
        _check_progress(graph, cuts, number, {place for place in behind if place not in home}, to_loss, unbound)
        for place in behind:
            home.setdefault(place, number)
    stage_of: dict[str, int] = {}
    for place, node in enumerate(nodes):
        if place in unbound:
            continue
        if place not in home:
            earlier = max((stage_of.get(name, 0) for name in walk.inputs(node)), default=0)
            home[place] = last if place in to_loss else earlier
        stage_of.update((name, home[place]) for name in node.output if name)
    _check_loss(nodes, main, home, cuts)
    _check_crossing(nodes, cuts, home, stage_of)
    stages: list[set[int]] = [{place for place, stage in home.items() if stage == number} for number in range(last + 1)]
    for value in graph.output:
        maker = next((place for place in unbound if value.name in nodes[place].output), None)
        if maker is not None:
            stage_of[value.name] = _reader(nodes, stages, value.name)
            stages[stage_of[value.name]].add(maker)
    for stage in stages:
        _complete(nodes, stage, unbound)
    return Assignment(stages, stage_of)


def free_nodes(graph: onnx.GraphProto, weights: Collection[str]) -> set[int]:
    """Indices of the nodes that each stage computes for itself: their outputs depend on weights alone, or on the batch
    alone.
    """
    # Constants belong to neither kind.
    sources = {value.name: "weight" if value.name in weights else "batch" for value in graph.input}
    dependent: set[str] = set()
    places = set()
    for place, node in enumerate(graph.node):
        read = walk.inputs(node)
        kinds = {sources[name] for name in read if name in sources}
        once = node.op_type in HEAVY | DRAWING or node.domain == CPU_DOMAIN
        if once or len(kinds) > 1 or not dependent.isdisjoint(read):
            dependent.update(node.output)
            continue
        places.add(place)
        sources.update((name, kind) for name in node.output for kind in kinds)
    return places


def _reader(nodes: Sequence[onnx.NodeProto], stages: Sequence[Collection[int]], output: str) -> int:
    """The stage of an output that any stage could compute: the first that reads the statistic itself, else the last."""
    weight, last = output.removesuffix(STATISTIC), len(stages) - 1
    if weight == output:
        return last
    return next((n for n, places in enumerate(stages) if any(weight in walk.inputs(nodes[p]) for p in places)), last)


def _complete(nodes: Sequence[onnx.NodeProto], stage: set[int], unbound: Collection[int]) -> None:
    """Add to a stage the nodes that it computes for itself, in place."""
    names_read = {name for place in stage for name in walk.inputs(nodes[place])}
    for place in sorted(unbound, reverse=True):
        if place in stage or names_read.intersection(nodes[place].output):
            stage.add(place)
            names_read |= walk.inputs(nodes[place])


def _check_names(graph: onnx.GraphProto, cuts: Sequence[Sequence[str]], weights: Collection[str]) -> None:
    produced = {name for node in graph.node for name in node.output if name}
    inputs = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    for number, cut in enumerate(cuts):
        key_path, cut_names = f"{WHERE}[{number}]", set[str]()
        if not cut:
            raise UserError("the cut names no tensor", where=key_path, fix="name the tensors that leave the stage")
        for name in cut:
            if name in inputs:
                kind = "a weight" if name in weights else "an input of the model or a constant"
                raise UserError(
                    f"{name!r} is {kind}, before which there is nothing to compute",
                    where=key_path,
                    fix="name a tensor that a node makes",
                )
            if name not in produced:
                close = difflib.get_close_matches(name, sorted(produced), 3)
                hint = f"did you mean {' or '.join(map(repr, close))}?" if close else "`ortflow inspect` lists tensors"
                raise UserError(f"the graph has no tensor {name!r} on the way to the loss", where=key_path, fix=hint)
            if name in cut_names:
                raise UserError(f"{name!r} is named twice", where=key_path, fix="name each tensor once")
            cut_names.add(name)


def _check_progress(
    graph: onnx.GraphProto,
    cuts: Sequence[Sequence[str]],
    number: int,
    new: Collection[int],
    to_loss: Collection[int],
    unbound: Collection[int],
) -> None:
    """Check that a stage has nodes of its own, and that the loss needs its outputs."""
    key_path, names = f"{WHERE}[{number}]", ", ".join(map(repr, cuts[number]))
    makers = {name: place for place, node in enumerate(graph.node) for name in node.output if name}
    for name in cuts[number]:
        if makers[name] not in to_loss:
            raise UserError(
                f"the loss does not depend on {name!r}", where=key_path, fix="name a tensor between inputs and loss"
            )
    if all(makers[name] in unbound for name in cuts[number]):
        raise UserError(
            f"{names} depends on weights alone or on the batch alone, so each stage computes it for itself",
            where=key_path,
            fix="name a tensor that depends on both",
        )
    if not new:
        before = ", ".join(map(repr, cuts[number - 1])) if number else ""
        raise UserError(
            f"no node lies between {before} and {names}, so stage {number} would have nothing to compute",
            where=key_path,
            fix="list the cuts in the order in which the model computes them",
        )


def _check_loss(
    nodes: Sequence[onnx.NodeProto], main: Sequence[str], home: dict[int, int], cuts: Sequence[Sequence[str]]
) -> None:
    last = len(cuts)
    for place, node in enumerate(nodes):
        if home.get(place, last) < last and not set(main).isdisjoint(node.output):
            names = ", ".join(map(repr, cuts[home[place]]))
            raise UserError(
                f"{names} depends on the loss, so the last stage would have nothing to compute",
                where=f"{WHERE}[{home[place]}]",
                fix="name a tensor before the loss",
            )


def _check_crossing(
    nodes: Sequence[onnx.NodeProto], cuts: Sequence[Sequence[str]], home: dict[int, int], stage_of: dict[str, int]
) -> None:
    """Check that each named tensor leaves its stage."""
    reach: dict[str, int] = {}
    for place, node in enumerate(nodes):
        for name in walk.inputs(node):
            reach[name] = max(reach.get(name, 0), home.get(place, 0))
    for number, cut in enumerate(cuts):
        for name in cut:
            if name in stage_of and reach.get(name, 0) <= number:
                other_names = ", ".join(repr(other) for other in cut if other != name)
                raise UserError(
                    f"{name!r} does not separate two stages: all that reads it lies before {other_names or 'the cut'}",
                    where=f"{WHERE}[{number}]",
                    fix="leave it out, or name the tensor that the next stage reads",
                )
