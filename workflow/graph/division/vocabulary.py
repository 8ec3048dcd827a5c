"""Divides token embeddings by rows, and the products that score all tokens by columns.

A token is looked up by the part that has its row; the others add zeros. The loss needs the maximum of the scores, the
sum of their exponentials, and the score of the label. All three are reduced over the parts; the scores are not
gathered.
"""

from __future__ import annotations

from collections.abc import Collection

from ortflow.workflow.graph.division.divisible_layers import Weights, cut_of_scores
from ortflow.workflow.graph.rules.cut import Cut, Reblock, Unsupported
from ortflow.workflow.graph.rules.division_plan import Plan
from ortflow.workflow.graph.rules.facts import Facts
from ortflow.workflow.graph.rules.spread import Spread

LEAST = 64
"""Number of rows from which on a table is worth dividing."""


def find_vocabulary(
    facts: Facts, weights: Weights, parts: int, candidates: Collection[int], chosen_names: Collection[str] | None
) -> tuple[Plan, list[str]]:
    """The changes, and the names of the matrices that they divide.

    `candidates` are the indices of products and look-ups outside divided layers. `chosen_names` restricts the division
    to these tables, if the evaluation graph must match the training graph.
    """
    plan, names = Plan(), []
    by_name: dict[str, list[int]] = {}
    for place in sorted(weights.of):
        by_name.setdefault(weights.of[place], []).append(place)
    for name, places in by_name.items():
        if chosen_names is not None and name not in chosen_names:
            continue
        if not set(candidates) >= set(places) or not _only_read_by(facts, name, places):
            continue
        changes = _divided(facts, weights, parts, name, places, chosen_names is not None)
        if changes is not None:
            plan.add(changes)
            names.append(name)
    return plan, names


def _divided(facts: Facts, weights: Weights, parts: int, name: str, places: list[int], forced: bool) -> Plan | None:
    plan = Plan()
    lookups = [place for place in places if place in weights.tables]
    rows = facts.tensors[name][0]
    for place in lookups:
        if rows < max(LEAST, parts) or not (forced or _is_data(facts, facts.nodes[place].input[1])):
            return None
        cut = Cut(0, (rows,))
        plan.lookups[place] = plan.slices[place, 0] = cut
    for place in places:
        if place in lookups:
            continue
        scores = _scores(facts, parts, place, bool(lookups) or forced)
        if scores is None:
            return None
        if lookups and scores.cuts[facts.nodes[place].output[0]].length != rows:
            # The product sums over the rows: the table has another use.
            return None
        plan.add(scores)
    return plan


def _scores(facts: Facts, parts: int, place: int, gather: bool) -> Plan | None:
    """Divide the product's columns up to the loss or, with `gather`, gather its scores."""
    cut, node = cut_of_scores(facts, place), facts.nodes[place]
    if cut is None or cut.length < max(LEAST, parts):
        return None
    spread = Spread(facts, parts, {}, frozenset(), scores=True)
    try:
        plan = spread.run({place: cut})
        if plan.entropies or plan.normal or plan.sums:
            return plan
    except (Unsupported, Reblock):
        pass
    if not gather:
        return None
    plan, value = Plan(), node.output[0]
    begin = Spread(facts, parts, {}, frozenset(), scores=True)
    begin.begin(place, cut)
    plan.add(begin.plan)
    plan.cuts[value] = cut
    readers = facts.readers.get(value, [])
    if len(readers) == 1 and value not in facts.outputs:
        reader, slot = readers[0]
        add = facts.nodes[reader]
        bias = add.input[1 - slot] if add.op_type == "Add" and slot >= 0 else ""
        if bias in facts.tensors and facts.tensors[bias] == (cut.length,):
            plan.slices[reader, 1 - slot] = cut.at(0)
            value = add.output[0]
            plan.cuts[value] = cut
    plan.gathered[value] = cut
    return plan


def _only_read_by(facts: Facts, name: str, places: list[int]) -> bool:
    """Whether no other nodes read a matrix, transposed or not."""
    for place, slot in facts.readers.get(name, []):
        node = facts.nodes[place]
        if place in places:
            continue
        if slot != 0 or node.op_type not in ("Transpose", "Identity", "Cast"):
            return False
        if not _only_read_by(facts, node.output[0], places):
            return False
    return name not in facts.outputs


def _is_data(facts: Facts, value: str) -> bool:
    """Whether a value is an input of the model, at most reshaped or shifted."""
    while value in facts.makers:
        node = facts.nodes[facts.makers[value]]
        if node.op_type not in ("Cast", "Identity", "Reshape", "Flatten", "Slice", "Squeeze", "Unsqueeze", "Where"):
            return False
        value = node.input[1] if node.op_type == "Where" else node.input[0]
    return value in facts.inputs
