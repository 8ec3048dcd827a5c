"""Finds layers that can be divided: weights split by columns, followed by weights split by rows.

A matrix product with a weight may be the end of such a layer: the weight's rows are divided, and the parts' results
summed. Its input comes from other products with weights, whose columns are divided. The layer can be divided if
everything between them can be computed on one part: attention heads, activations, gates, norms over a head.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.division.named import Named
from ortflow.workflow.graph.ir.edit import attributes_of
from ortflow.workflow.graph.operators.families import DIVISIONS, Trait, having
from ortflow.workflow.graph.rules.cut import Cut, Indivisible, Reblock, Unsupported, even
from ortflow.workflow.graph.rules.division_plan import Plan
from ortflow.workflow.graph.rules.facts import Facts
from ortflow.workflow.graph.rules.spread import Spread

_FIRST_DIVIDED = having(Trait.FIRST_DIVIDED)
_MOST = 16
"""Attempts per layer."""


@dataclass
class Weights:
    """Nodes that read weights."""

    linears: dict[int, int]
    """Index of a product with a weight -> the input that is not a weight."""
    tables: set[int]
    """Indices of look-ups in a table."""
    of: dict[int, str]
    """Index -> the weight's name."""


@dataclass
class Layers:
    """The results of the search."""

    plan: Plan = field(default_factory=Plan)
    columns: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    """Weight that the run file names -> why no layer with it could be divided as named."""


def weights_of(facts: Facts) -> Weights:
    """Products and look-ups of matrices among the tensors."""
    weights = Weights({}, set(), {})
    for place, node in enumerate(facts.nodes):
        if node.domain != "":
            continue
        if node.op_type == "Gather" and not attributes_of(node).get("axis", 0) and _is_matrix(facts, node.input[0]):
            weights.tables.add(place)
            weights.of[place] = node.input[0]
        elif node.op_type == "MatMul" or (node.op_type == "Gemm" and _is_plain(attributes_of(node))):
            name = weight_of(facts, node.input[1])
            if name is not None and weight_of(facts, node.input[0]) is None:
                weights.linears[place] = 0
                weights.of[place] = name
    return weights


def weight_of(facts: Facts, value: str) -> str | None:
    """The matrix that a value equals, possibly transposed; None if it equals none."""
    while value not in facts.tensors and value in facts.makers:
        node = facts.nodes[facts.makers[value]]
        if node.op_type not in ("Transpose", "Identity", "Cast"):
            return None
        value = node.input[0]
    return value if _is_matrix(facts, value) else None


def _is_matrix(facts: Facts, value: str) -> bool:
    return len(facts.tensors.get(value, ())) == 2


def _is_plain(flags: Mapping[str, float]) -> bool:
    return not flags.get("transA", 0) and flags.get("alpha", 1.0) == flags.get("beta", 1.0) == 1.0


def find_layers(facts: Facts, weights: Weights, parts: int, undivided: Collection[str], assigned: Named) -> Layers:
    """Find every layer that can be divided; weights in `undivided` stay whole, and `assigned` ones come first.

    Raises UserError if a layer could be divided, but one of its sizes is not a multiple of the number of parts.
    """
    layers = Layers()
    linears = {place: slot for place, slot in weights.linears.items() if weights.of[place] not in undivided}
    used_places: set[int] = set()
    candidates = [place for place in linears if weights.of[place] not in assigned.columns]
    for row in sorted(candidates, key=lambda place: (weights.of[place] not in assigned.rows, place)):
        if row in used_places:
            continue
        search = _Search(facts, weights, linears, used_places, parts, assigned)
        try:
            seeds, plan = search.layer(row)
        except Unsupported as error:
            if isinstance(error, Indivisible):
                _refuse(facts, weights, linears, used_places, row, error, parts, assigned)
            _explain(layers.reasons, facts, weights, row, str(error), assigned)
            continue
        layers.plan.add(plan)
        layers.columns += sorted(seeds)
        layers.rows += sorted(plan.rows)
        used_places |= seeds.keys() | plan.rows.keys()
    for row in weights.linears:
        name = weights.of[row]
        if name in assigned.whole or name in assigned.columns:
            for source in sources(facts, weights, row) if assigned.columns else ():
                reason = f"{name!r}, which sums over its columns, is {assigned.way(name)}"
                layers.reasons.setdefault(weights.of[source], reason)
    return layers


def _explain(reasons: dict[str, str], facts: Facts, weights: Weights, row: int, error: str, assigned: Named) -> None:
    """Note why the layer that ends in a product is not divided, for the weights of it that the run file names."""
    name = weights.of[row]
    before = [weights.of[place] for place in sources(facts, weights, row)]
    if name in assigned.rows:
        ways = [
            f"{name_before!r} is {way}"
            for name_before in before
            if name_before not in assigned.columns and (way := assigned.way(name_before))
        ]
        reasons.setdefault(name, f"of the weights before it, {' and '.join(dict.fromkeys(ways))}" if ways else error)
    for name_before in before:
        if name_before in assigned.columns:
            reasons.setdefault(name_before, f"the layer that ends with {name!r} cannot be divided, because {error}")


def _refuse(
    facts: Facts, weights: Weights, linears: Mapping[int, int], used_places: set[int], row: int, error: Indivisible,
    parts: int, assigned: Named,
) -> None:  # fmt: skip
    """Raise UserError if only a size prevents the division."""
    try:
        _, plan = _Search(facts, weights, linears, used_places, 1, assigned).layer(row)
    except Unsupported:
        return
    heads = next((length for length in plan.heads if length % parts), None)
    measure = f"{heads} heads, which are" if heads else f"a width of {error.length}, which is"
    raise UserError(
        f"is {parts}, and the layer that ends with the weight {weights.of[row]!r} has {measure} not divisible by it",
        where="parallel.horizontal",
        fix=f"set it to a divisor of {heads or error.length}, or name the weight under parallel.whole",
    )


class _Search:
    def __init__(
        self,
        facts: Facts,
        weights: Weights,
        linears: Mapping[int, int],
        used_places: set[int],
        parts: int,
        assigned: Named,
    ) -> None:
        self._facts, self._weights, self._taken, self._parts = facts, weights, used_places, parts
        self._linears = {place: slot for place, slot in linears.items() if place not in used_places}
        self._ends = {place: slot for place, slot in self._linears.items() if weights.of[place] not in assigned.columns}
        self._kept = {*assigned.rows, *assigned.whole}
        self._attempts = 0

    def layer(self, row: int) -> tuple[dict[int, tuple[int, ...]], Plan]:
        """The columns and the changes of the layer that ends in a product. Raises Unsupported."""
        excluded: set[int] = set()
        first: Indivisible | None = None
        while True:
            try:
                return self._closed(row, excluded)
            except Indivisible as error:
                # A few heads of keys and values that are shared by all heads of queries stay whole.
                first = first or error
                if error.seed is None or error.seed in excluded:
                    raise first from None
                excluded.add(error.seed)
            except Unsupported:
                if first is not None:
                    raise first from None
                raise

    def _closed(self, row: int, excluded: Collection[int]) -> tuple[dict[int, tuple[int, ...]], Plan]:
        """Merge layers that share a divided value."""
        seeds = self._seeds(row, excluded)
        rows = {row}
        while True:
            blocks, plan = self._attempt(seeds, {}, frozenset())
            if row not in plan.rows:
                raise Unsupported("it does not reach the row")
            new = plan.rows.keys() - rows
            further_seeds = (
                set().union(*(self._seeds(row_of_layer, excluded) for row_of_layer in new)) - seeds if new else set()
            )
            rows |= new
            if not further_seeds:
                return blocks, plan
            seeds = seeds | further_seeds

    def _attempt(
        self, seeds: set[int], blocks: Mapping[int, tuple[int, ...]], refused: frozenset[int]
    ) -> tuple[dict[int, tuple[int, ...]], Plan]:
        self._attempts += 1
        if self._attempts > _MOST:
            raise Unsupported("too many attempts")
        block_lengths = {seed: blocks.get(seed) or (self._width(seed),) for seed in seeds}
        cuts = {seed: even(self._axis(seed), lengths, self._parts, seed) for seed, lengths in block_lengths.items()}
        try:
            spread = Spread(self._facts, self._parts, self._ends, refused)
            return block_lengths, spread.run(cuts)
        except Reblock as proposal:
            try:
                return self._attempt(seeds, {**blocks, proposal.seed: proposal.blocks}, refused)
            except Unsupported as error:
                try:
                    return self._attempt(seeds, blocks, refused | {proposal.seed})
                except Indivisible:
                    raise
                except Unsupported:
                    raise error from None

    def _axis(self, seed: int) -> int:
        shape = self._facts.shape(self._facts.nodes[seed].output[0])
        if shape is None:
            raise Unsupported("the shape of a product is not known")
        return len(shape) - 1

    def _width(self, seed: int) -> int:
        width = self._facts.size(self._facts.nodes[seed].output[0], self._axis(seed))
        if width is None:
            raise Unsupported("the width of a product is not known")
        return width

    def _seeds(self, row: int, excluded: Collection[int]) -> set[int]:
        """The sources of a product's input that can be divided."""
        seeds = set()
        for place in sources(self._facts, self._weights, row):
            usable = place in self._linears or (place in self._weights.tables and place not in self._taken)
            if usable and place not in excluded and self._weights.of[place] not in self._kept:
                seeds.add(place)
        if not seeds:
            raise Unsupported("it reads nothing that can be divided")
        return seeds


def sources(facts: Facts, weights: Weights, row: int) -> set[int]:
    """The nearest products with weights, and look-ups in tables, that a product's input is computed from."""
    places, visited = set[int](), set[int]()
    waiting = [facts.nodes[row].input[weights.linears[row]]]
    while waiting:
        place = facts.makers.get(waiting.pop())
        if place is None or place in visited:
            continue
        visited.add(place)
        if place in weights.of:
            places.add(place)
            continue
        node = facts.nodes[place]
        if (node.domain, node.op_type) in DIVISIONS:
            waiting += node.input[:1] if node.op_type in _FIRST_DIVIDED else node.input
    return places


def names_of(weights: Weights, places: Collection[int]) -> Iterator[str]:
    """The weights at these places, in order, each once."""
    yield from dict.fromkeys(weights.of[place] for place in sorted(places))


def cut_of_scores(facts: Facts, place: int) -> Cut | None:
    """How the scores of a product are divided; None if their rank is unknown."""
    value = facts.nodes[place].output[0]
    shape = facts.shape(value)
    if shape is None:
        return None
    length = facts.size(value, len(shape) - 1)
    return None if length is None else Cut(len(shape) - 1, (length,))
