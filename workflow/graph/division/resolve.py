"""Which tensors are held in shares: those of which every reader wants the same share. Others are sliced when read."""

from __future__ import annotations

from ortflow.workflow.graph.ir.edit import attributes_of
from ortflow.workflow.graph.rules.cut import Cut
from ortflow.workflow.graph.rules.division_plan import Plan
from ortflow.workflow.graph.rules.facts import Facts

_TURNING = frozenset(["Transpose", "Identity", "Cast", "Unsqueeze"])


def resolve(facts: Facts, plan: Plan) -> dict[str, Cut]:
    """The tensors of which parts hold shares, and their cuts. Removes these from the plan's slices, in place.

    An operator that only moves a tensor's axes is computed on the share.
    """
    cuts_of_shares: dict[str, Cut] = {}
    waiting = sorted({facts.nodes[place].input[slot] for place, slot in plan.slices})
    while waiting:
        value = waiting.pop()
        slots = facts.readers.get(value, [])
        cuts = {plan.slices.get(slot) for slot in slots}
        cut = cuts.pop()
        if cuts or cut is None or value in facts.outputs:
            continue
        if value in facts.tensors:
            cuts_of_shares[value] = cut
        elif value in facts.makers:
            place = facts.makers[value]
            source = _before(facts, place, cut)
            if source is None:
                continue
            plan.slices[place, 0] = source
            plan.cuts[value] = cut
            waiting.append(facts.nodes[place].input[0])
        else:
            continue
        for slot in slots:
            del plan.slices[slot]
    return cuts_of_shares


def _before(facts: Facts, place: int, cut: Cut) -> Cut | None:
    """The cut that an operator which moves axes needs of its input, to give this one."""
    node = facts.nodes[place]
    if node.op_type not in _TURNING or node.domain != "" or len(node.output) > 1:
        return None
    if not _comes_from_tensor(facts, node.input[0]):
        return None
    if node.op_type == "Transpose":
        shape = facts.shape(node.input[0])
        if shape is None:
            return None
        order = list(attributes_of(node).get("perm", range(len(shape) - 1, -1, -1)))
        return cut.at(order[cut.axis])
    if node.op_type == "Unsqueeze":
        shape, axes = facts.shape(node.output[0]), facts.constant(node.input[1])
        if shape is None or axes is None:
            return None
        added = {int(axis) % len(shape) for axis in axes.reshape(-1)}
        if cut.axis in added:
            return None
        return cut.at(cut.axis - sum(axis < cut.axis for axis in added))
    return cut


def _comes_from_tensor(facts: Facts, value: str) -> bool:
    while value in facts.makers:
        node = facts.nodes[facts.makers[value]]
        if node.op_type not in _TURNING or node.domain != "":
            return False
        value = node.input[0]
    return value in facts.tensors
