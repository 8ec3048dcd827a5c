"""How elementwise operators act on divided inputs, and on shares of the tokens: rules that several families enter.

Each element of the result comes from one of each input.
"""

from __future__ import annotations

import onnx

from ortflow.workflow.graph.rules.cut import Cut
from ortflow.workflow.graph.rules.sequence import Search, Shares, Whole
from ortflow.workflow.graph.rules.spread import Cuts, Spread


def divided_alike(s: Spread, place: int, node: onnx.NodeProto, input_cuts: Cuts) -> Cuts:
    """Of one input: the result is divided as it is."""
    return input_cuts


def divided_together(s: Spread, place: int, node: onnx.NodeProto, input_cuts: Cuts) -> Cuts:
    """Of several inputs, which are broadcast."""
    ranks = [len(s.shape(name)) for name in node.input]
    rank = max(ranks)
    positions = {cut.at(cut.axis + rank - ranks[slot]) for slot, cut in enumerate(input_cuts) if cut is not None}
    if len(positions) > 1:
        raise s.unsupported(node)
    return [met(s, place, node, input_cuts, positions.pop(), rank)]


def met(s: Spread, place: int, node: onnx.NodeProto, input_cuts: Cuts, cut: Cut, rank: int) -> Cut:
    """The cut of the result. Undivided inputs are broadcast, or read in part."""
    for slot, name in enumerate(node.input):
        if input_cuts[slot] is not None or not name:
            continue
        beside(s, place, slot, cut, rank)
    return cut


def beside(s: Spread, place: int, slot: int, cut: Cut, rank: int) -> None:
    """The undivided input of an operator that broadcasts to `rank` axes, of which `cut` is divided."""
    shape = s.shape(s.facts.nodes[place].input[slot])
    axis = cut.axis - (rank - len(shape))
    if axis < 0 or shape[axis] == 1:
        s.copy(place, slot)
    elif shape[axis] == cut.length:
        s.demand(place, slot, cut.at(axis))
    else:
        raise s.unsupported(s.facts.nodes[place])


def by_token(s: Search, place: int, node: onnx.NodeProto, input_axes: Shares) -> Shares:
    """Of any number of inputs, which are broadcast."""
    counts = {axes for axes in input_axes if axes}
    shape = s.known(node.output[0])
    if len(counts) > 1:
        raise Whole
    (axes,) = counts
    for slot, name in enumerate(node.input):
        if input_axes[slot]:
            # What is broadcast along the tokens has no share of them.
            if s.rank(name) != len(shape[0]) or s.tokens(name, axes) != s.tokens(node.output[0], axes):
                raise Whole
        elif name:
            s.beside(place, slot, shape, axes)
    return [axes]
