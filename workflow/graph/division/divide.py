"""Entry point of this package: the graph of one part of a model, and the regions that its rank holds."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import onnx

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.division.divisible_layers import Layers, Weights, find_layers, names_of, weights_of
from ortflow.workflow.graph.division.named import Named, check_named, named_in
from ortflow.workflow.graph.division.resolve import resolve
from ortflow.workflow.graph.division.rewrite import Rewrite
from ortflow.workflow.graph.division.trials import facts_of
from ortflow.workflow.graph.division.vocabulary import find_vocabulary
from ortflow.workflow.graph.ir import shapes
from ortflow.workflow.graph.ir.order import prune, sort_nodes
from ortflow.workflow.graph.rules.cut import Cut
from ortflow.workflow.graph.rules.division_plan import Plan
from ortflow.workflow.graph.rules.facts import Facts
from ortflow.workflow.parallel.region import WHOLE, Region

_SHOWN = 4


@dataclass(frozen=True)
class Divided:
    """A part of a model."""

    model: onnx.ModelProto
    """Its graph. Call `ir.collective.finish` after the last change to it."""
    regions: Mapping[str, Region]
    """The region of each divided tensor that the part holds."""
    notes: tuple[str, ...]
    """Log lines: what is divided, and which matrices are not."""
    cuts: Mapping[str, Cut]
    """How the tensors are cut; the same on all parts."""
    named: Named
    """Weights that the run file names."""
    sums: tuple[str, ...]
    """Values that are summed over the parts behind divided layers and look-ups."""


def divide(
    model: onnx.ModelProto,
    tensors: Mapping[str, Sequence[int]],
    trained: Collection[str],
    loss: str,
    part: int,
    parts: int,
    channel: int,
    like: Divided | None = None,
    named: Mapping[str, Sequence[str]] | None = None,
) -> Divided:
    """Divide a forward graph with its loss over `parts` ranks.

    Parameters
    ----------
    model
        Not yet differentiated; sorted, with inferred shapes.
    tensors
        Shapes of the whole parameters and states, which are inputs of the graph.
    trained
        Tensors that need gradients; empty for an evaluation graph.
    loss
        Output that is differentiated.
    part
        Index of the part. The graphs of all parts run the same collectives in the same order.
    channel
        Channel under which `sessions.collectives` registers the ranks of the parts.
    like
        The divided training graph, if this is the evaluation graph: the same tensors are divided in the same way.
    named
        Names or patterns of weights that stay `whole`, or are divided by `columns` or by `rows`; others are found.

    Raises
    ------
    UserError
        If nothing can be divided, a layer only lacks a number of heads or a width that is divisible, or a weight cannot
        be divided as it is named.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    sort_nodes(copy.graph)
    facts = facts_of(copy, tensors, trained, loss)
    weights = weights_of(facts)
    assigned = named_in(named or {}, dict.fromkeys(weights.of.values())) if like is None else like.named
    undivided = set(assigned.whole)
    if like is not None:
        undivided |= set(tensors) - like.cuts.keys()
    layers = find_layers(facts, weights, parts, undivided, assigned)
    plan = layers.plan
    candidates = {
        place
        for place in weights.of.keys() - {*layers.columns, *layers.rows}
        if weights.of[place] not in undivided and _may_be_vocabulary(weights, place, assigned)
    }
    divided_names = None if like is None else like.cuts.keys()
    scores, tables = find_vocabulary(facts, weights, parts, candidates, divided_names)
    plan.add(scores)
    if like is None:
        check_named(
            assigned, [*names_of(weights, layers.columns), *tables], [*names_of(weights, layers.rows), *tables],
            layers.reasons,
        )  # fmt: skip
    cuts = resolve(facts, plan)
    missing: dict[str, Cut] = {}
    if like is not None:
        missing = {name: cut for name, cut in like.cuts.items() if cuts.get(name) != cut}
        _undo(facts, plan, cuts, like)
        cuts = dict(like.cuts)
    if not cuts:
        raise UserError(
            f"is {parts}, but no layer of the model can be divided: none consists of products with two matrices"
            " between which each part can compute on its own",
            where="parallel.horizontal",
            fix="set it to 1",
        )
    rewrite = Rewrite(copy, facts, plan, cuts, part, parts, channel)
    rewrite.gather_tensors(missing)
    rewrite.run()
    sort_nodes(copy.graph)
    prune(copy.graph)
    shapes.infer(copy)
    regions = {name: cuts[name].region(part, parts) if name in cuts else WHOLE for name in tensors}
    return Divided(
        copy, regions, tuple(_notes(facts, weights, layers, tables, cuts, parts)), cuts, assigned, tuple(rewrite.sums)
    )


def _may_be_vocabulary(weights: Weights, place: int, assigned: Named) -> bool:
    """Whether dividing a vocabulary divides the weight as the run file says: tables by rows, products by columns."""
    name = weights.of[place]
    uses = [other in weights.tables for other, other_name in weights.of.items() if other_name == name]
    return not (name in assigned.rows and not any(uses)) and not (name in assigned.columns and all(uses))


def _undo(facts: Facts, plan: Plan, cuts: Mapping[str, Cut], reference: Divided) -> None:
    """Slice the tensors that this graph would hold shares of and the other one does not."""
    for name, cut in cuts.items():
        if reference.cuts.get(name) != cut:
            for slot in facts.readers[name]:
                plan.slices[slot] = cut


def _notes(
    facts: Facts, weights: Weights, layers: Layers, tables: Sequence[str], cuts: Mapping[str, Cut], parts: int
) -> list[str]:
    notes = []
    if layers.rows:
        rows = list(names_of(weights, layers.rows))
        notes.append(f"{len(layers.rows)} layers divided over {parts} ranks, with their rows in {_some(rows)}")
    if tables:
        notes.append(f"vocabulary divided over {parts} ranks: {_some(tables)}")
    matrices = dict.fromkeys(weights.of[place] for place in sorted(weights.of))
    undivided = [name for name in matrices if name not in cuts]
    values = {name: facts.tensors[name][0] * facts.tensors[name][1] for name in matrices}
    if undivided:
        share = sum(values[name] for name in undivided) / sum(values.values())
        notes.append(f"whole on each rank: {_some(undivided)}, {share:.1%} of the values in matrices")
    return notes


def _some(names: Sequence[str]) -> str:
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + rest
