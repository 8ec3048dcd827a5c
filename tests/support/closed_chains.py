"""Finds chains of comparisons with the names of a closed set whose last branch takes whatever is left."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence

Names = frozenset[str]


def names_of(annotation: ast.AST, aliases: Mapping[str, Names]) -> Names:
    """The texts of the `Literal` in a type."""
    if isinstance(annotation, ast.Subscript) and getattr(annotation.value, "id", "") == "Literal":
        constants = [node for node in ast.walk(annotation.slice) if isinstance(node, ast.Constant)]
        return frozenset(node.value for node in constants if isinstance(node.value, str))
    if isinstance(annotation, ast.Name):
        return aliases.get(annotation.id, frozenset())
    return frozenset().union(*(names_of(child, aliases) for child in ast.iter_child_nodes(annotation)))


def closed_sets(trees: Sequence[ast.Module]) -> set[Names]:
    """The sets of two names or more that a field, a parameter or an alias has as its type."""
    aliases = {
        statement.targets[0].id: names_of(statement.value, {})
        for tree in trees
        for statement in tree.body
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)
    }
    annotations = (
        node.annotation
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign | ast.arg) and node.annotation is not None
    )
    sets = {*aliases.values(), *(names_of(annotation, aliases) for annotation in annotations)}
    return {names for names in sets if len(names) >= 2}


def open_ends(tree: ast.Module, sets: set[Names]) -> Iterator[tuple[int, str]]:
    """Line and subject of each chain that compares with all names of a set but one, and ends in no error."""
    further = {id(node.orelse[0]) for node in ast.walk(tree) if isinstance(node, ast.If) and len(node.orelse) == 1}
    further |= {id(node.orelse) for node in ast.walk(tree) if isinstance(node, ast.IfExp)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.If | ast.IfExp) or id(node) in further:
            continue
        subject, names, rest = _chain(node)
        if len(names) >= 2 and rest is not None and any(names < other and len(other - names) == 1 for other in sets):
            yield node.lineno, subject


def _chain(node: ast.If | ast.IfExp) -> tuple[str, Names, ast.AST | None]:
    """What is compared, with which names, and the last branch; None if there is none, or if it is an error."""
    subject, names = "", frozenset[str]()
    rest: ast.AST | None = node
    while isinstance(rest, ast.If | ast.IfExp):
        compared = _compared(rest.test)
        if compared is None or subject not in ("", compared[0]):
            break
        subject, names = compared[0], names | compared[1]
        branch = rest.orelse if isinstance(rest.orelse, list) else [rest.orelse]
        rest = branch[0] if len(branch) == 1 else branch[-1] if branch else None
    return subject, names, None if _is_error(rest) else rest


def _compared(test: ast.expr) -> tuple[str, Names] | None:
    if not isinstance(test, ast.Compare) or not isinstance(test.ops[0], ast.Eq | ast.In):
        return None
    right = test.comparators[0]
    parts = right.elts if isinstance(right, ast.Tuple | ast.Set) else [right]
    texts = [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]
    return (ast.unparse(test.left), frozenset(texts)) if len(texts) == len(parts) else None


def _is_error(statement: ast.AST | None) -> bool:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        return ast.unparse(statement.value.func) == "assert_never"
    return isinstance(statement, ast.Raise | ast.Assert)
