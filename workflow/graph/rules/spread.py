"""Follows divided values through a graph, node by node, until sums over the parts end them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import onnx

from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.ir.registry import registered_in
from ortflow.workflow.graph.rules.cut import Cut, Unsupported
from ortflow.workflow.graph.rules.division_plan import Plan
from ortflow.workflow.graph.rules.facts import Facts

Cuts = Sequence[Cut | None]
"""The cuts of a node's inputs or outputs; None for a whole one."""
Rule = Callable[["Spread", int, onnx.NodeProto, Cuts], Cuts]
RULES: dict[tuple[str, str], Rule] = {}
"""(Domain, operator) -> its rule for divided inputs. A rule raises Unsupported if it does not apply."""


def division_rule(*operators: str, domain: str = "") -> Callable[[Rule], Rule]:
    """Register a rule for operators."""
    return registered_in(RULES, *operators, domain=domain)


class Spread:
    """One attempt: `seeds` produce divided values, and `linears` are products with weights that may sum them."""

    def __init__(
        self, facts: Facts, parts: int, linears: Mapping[int, int], refused: Collection[int], *, scores: bool = False
    ) -> None:
        self.facts, self.parts, self.linears, self.refused = facts, parts, linears, refused
        self.scores = scores
        """Whether these are scores over a vocabulary, over which sums and losses may be computed."""
        self.plan = Plan()

    def run(self, seeds: Mapping[int, Cut]) -> Plan:
        """Find the changes. `seeds` maps nodes to the cuts of their outputs. Raises Unsupported and Reblock."""
        facts, cuts = self.facts, self.plan.cuts
        for place in range(min(seeds), len(facts.nodes)):
            node = facts.nodes[place]
            input_cuts = [cuts.get(name) for name in node.input]
            if place in seeds:
                if any(input_cuts):
                    # Columns of columns.
                    raise self.unsupported(node)
                output_cuts: Cuts = [self.begin(place, seeds[place])]
            elif any(input_cuts):
                output_cuts = self._follow(place, node, input_cuts)
            elif any(cuts.keys() & walk.captured(inner) for inner in walk.subgraphs(node)):
                raise self.unsupported(node)
            else:
                continue
            for name, cut in zip(node.output, output_cuts, strict=False):
                if not name or cut is None:
                    continue
                if name in facts.outputs:
                    raise Unsupported(f"the output {name!r} would be divided")
                cuts[name] = cut
        return self.plan

    def begin(self, place: int, cut: Cut) -> Cut:
        """A product with some columns of a weight, or a look-up of some columns of a table."""
        node = self.facts.nodes[place]
        if node.op_type == "Gather":
            self.demand(place, 0, cut.at(1))
            return cut
        self.copy(place, 0)
        self.demand(place, 1, cut.at(0 if transposed(node) else 1))
        if len(node.input) > 2 and node.input[2]:
            bias = self.shape(node.input[2])
            if bias and bias[-1] == cut.length:
                self.demand(place, 2, cut.at(len(bias) - 1))
            else:
                self.copy(place, 2)
        return cut

    def _follow(self, place: int, node: onnx.NodeProto, input_cuts: Cuts) -> Cuts:
        if node.op_type in ("Shape", "Size") and node.domain == "":
            return [None]  # `rewrite` makes them whole
        if place in self.linears:
            slot = self.linears[place]
            cut, shape = input_cuts[slot], self.facts.shape(node.input[slot])
            if cut is not None and shape is not None and cut.axis == len(shape) - 1 and sum(map(bool, input_cuts)) == 1:
                self.plan.rows[place] = cut
                self.demand(place, 1, cut.at(1 if transposed(node) else 0))
                return [None]
        rule = RULES.get((node.domain, node.op_type))
        if rule is None or list(walk.subgraphs(node)):
            raise self.unsupported(node)
        return rule(self, place, node, input_cuts)

    def unsupported(self, node: onnx.NodeProto) -> Unsupported:
        """Rule for a node that has none for its inputs."""
        return Unsupported(f"{walk.called(node)} reads a divided value")

    def copy(self, place: int, slot: int) -> None:
        """Record that an undivided input is read whole."""
        self.plan.copies.add((place, slot))

    def demand(self, place: int, slot: int, cut: Cut) -> None:
        """Record that an undivided input is read in part. Raises Unsupported if the offset of the part varies."""
        if cut.varies:
            raise Unsupported("the length of a divided axis varies")
        self.plan.slices[place, slot] = cut

    def shape(self, value: str) -> tuple[int, ...]:
        """The shape of a value. Raises Unsupported if it is unknown."""
        shape = self.facts.shape(value)
        if shape is None:
            raise Unsupported(f"the shape of {value!r} is not known")
        return shape

    def axes(self, node: onnx.NodeProto, slot: int, rank: int) -> list[int] | None:
        """The axes in an input or in the attribute `axes`, counted from 0; None if not given."""
        name = node.input[slot] if len(node.input) > slot else ""
        if not name:
            listed = next((list(a.ints) for a in node.attribute if a.name == "axes"), None)
        else:
            value = self.facts.constant(name)
            if value is None:
                raise self.unsupported(node)
            listed = [int(axis) for axis in value.reshape(-1)]
        return None if listed is None else [axis % rank for axis in listed]


def transposed(node: onnx.NodeProto) -> bool:
    """Whether a product reads its weight transposed."""
    return node.op_type == "Gemm" and any(a.name == "transB" and a.i for a in node.attribute)
