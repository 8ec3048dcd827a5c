"""The changes that are made to a module, by Cosmic Ray's operators. Pure.

Of an operator's replacements by every other one, the nearest and, for comparisons, the negation are made: `a + b`
becomes `a - b`, not also `a << b`. Annotations, `if TYPE_CHECKING`, `frozen=True` and the `*` before keyword parameters
are left alone: no run shows them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator
from parso.tree import NodeOrLeaf as Node

_BINARY = (
    "Add_Sub", "Sub_Add", "Mul_Div", "Div_Mul", "FloorDiv_Div", "Mod_FloorDiv", "Pow_Mul", "LShift_RShift",
    "RShift_LShift", "BitOr_BitAnd", "BitAnd_BitOr", "BitXor_BitAnd",
)  # fmt: skip
_COMPARISONS = (
    "Eq_NotEq", "NotEq_Eq", "Lt_LtE", "Lt_GtE", "LtE_Lt", "LtE_Gt", "Gt_GtE", "Gt_LtE", "GtE_Gt", "GtE_Lt", "Is_IsNot",
    "IsNot_Is",
)  # fmt: skip
OPERATORS = (
    *(f"ReplaceBinaryOperator_{name}" for name in _BINARY),
    *(f"ReplaceComparisonOperator_{name}" for name in _COMPARISONS),
    "ReplaceUnaryOperator_USub_UAdd",
    "ReplaceUnaryOperator_Delete_Not",
    "AddNot",
    "ReplaceTrueWithFalse",
    "ReplaceFalseWithTrue",
    "ReplaceAndWithOr",
    "ReplaceOrWithAnd",
    "ReplaceBreakWithContinue",
    "ReplaceContinueWithBreak",
    "ExceptionReplacer",
    "NumberReplacer",
    "RemoveDecorator",
    "ZeroIterationForLoop",
)


@dataclass(frozen=True)
class Mutant:
    """A module with one change."""

    operator: str
    occurrence: int
    """The number of the place among those that the operator can change."""
    line: int
    """First and last changed line of the original, from 1."""
    last_line: int
    source: str
    """The changed module."""

    @property
    def key(self) -> str:
        """The name of the mutant in its module."""
        return f"{self.operator} {self.occurrence}"


def mutants(source: str) -> Iterator[Mutant]:
    """Every mutant of a module that differs from it and from those before."""
    tree = get_ast(source)
    annotations = _annotations(source)
    seen = {ast.dump(ast.parse(source))}
    for name in OPERATORS:
        operator = get_operator(f"core/{name}")()
        places = [(node, place) for node in ast_nodes(tree) for place in operator.mutation_positions(node)]
        for occurrence, (node, (start, end)) in enumerate(places):
            if any(first <= start < last for first, last in annotations) or _is_declaration(node):
                continue
            try:
                changed = mutate_code(source, operator, occurrence)
            except AttributeError:  # Cosmic Ray 8.7: `except (module.Error, …)`
                continue
            form = _form(changed)
            if changed is not None and form is not None and form not in seen:
                seen.add(form)
                yield Mutant(name, occurrence, start[0], end[0], changed)


def _is_declaration(node: Node) -> bool:
    """Whether a place is a part of what only a type checker or a caller's syntax sees."""
    parent = node.parent
    return (parent is not None and (parent.type == "parameters" or parent.get_code().strip() == "frozen=True")) or (
        node.type == "if_stmt" and "TYPE_CHECKING" in node.children[1].get_code()
    )


def _form(source: str | None) -> str | None:
    """The syntax tree as text; None if it is no Python."""
    try:
        return None if source is None else ast.dump(ast.parse(source))
    except SyntaxError:
        return None


def _annotations(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Start and end of each annotation, as line from 1 and column from 0."""
    places = []
    for node in ast.walk(ast.parse(source)):
        for field in ("annotation", "returns"):
            found = getattr(node, field, None)
            if isinstance(found, ast.expr):
                places.append(((found.lineno, found.col_offset), (found.end_lineno or 0, found.end_col_offset or 0)))
    return places
