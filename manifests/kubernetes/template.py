"""A document's tree as the text of a Helm template. Pure; called by `chart`.

The text reads like a template written by hand: a line a key, an `if` around what is conditional. The template is run
with a scope: `run`, the run's values, and one key for each `Param`. Values go through toJson, which is YAML.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain

from ortflow.manifests.kubernetes import tree as t
from ortflow.manifests.kubernetes.defaults import steps
from ortflow.manifests.kubernetes.functions import FUNCTIONS

PYTHONS_ALONE = frozenset({"new_budget", "fresh"})
"""Parameters that are never true in a chart."""

Lines = Iterator[str]


def block(node: dict[object, t.Node], indent: int = 0, depth: int = 0) -> Lines:
    """The lines of a mapping; `depth` counts the loops around it."""
    pad = " " * indent
    for key, below in node.items():
        if isinstance(key, t.Entries):
            inner = depth + 1
            yield f"{pad}{{{{- range $key{inner}, $item{inner} := {expression(key.of, depth)} }}}}"
            yield from _entry(_inline(key.key, inner), below, indent, inner)
            yield f"{pad}{{{{- end }}}}"
        else:
            yield from _entry(_inline(key, depth), below, indent, depth)


def _entry(key: str, node: t.Node, indent: int, depth: int) -> Lines:
    pad = " " * indent
    if isinstance(node, t.When):
        if _never(node):
            return
        yield f"{pad}{{{{- if {expression(node.condition, depth)} }}}}"
        yield from _entry(key, node.then, indent, depth)
        if node.otherwise is not None:
            yield f"{pad}{{{{- else }}}}"
            yield from _entry(key, node.otherwise, indent, depth)
        yield f"{pad}{{{{- end }}}}"
    elif isinstance(node, t.Given):
        yield f"{pad}{{{{- if {_presence(node, depth)} }}}}"
        yield from _entry(key, node.value, indent, depth)
        yield f"{pad}{{{{- end }}}}"
    elif isinstance(node, dict | list) and node:
        condition = _presence(node, depth)
        if condition is not None:
            yield f"{pad}{{{{- if {condition} }}}}"
        yield f"{pad}{key}:"
        yield from block(node, indent + 2, depth) if isinstance(node, dict) else _items(node, indent, depth)
        if condition is not None:
            yield f"{pad}{{{{- end }}}}"
    else:
        yield f"{pad}{key}: {_inline(node, depth)}"


def _items(node: list[t.Node], indent: int, depth: int) -> Lines:
    pad = " " * indent
    for item in node:
        if isinstance(item, t.When):
            if _never(item):
                continue
            yield f"{pad}{{{{- if {expression(item.condition, depth)} }}}}"
            yield from _item(item.then, indent, depth)
            yield f"{pad}{{{{- end }}}}"
        elif isinstance(item, t.Each):
            inner = depth + 1
            yield f"{pad}{{{{- range $key{inner}, $item{inner} := {expression(item.of, depth)} }}}}"
            yield from _item(item.item, indent, inner)
            yield f"{pad}{{{{- end }}}}"
        else:
            yield from _item(item, indent, depth)


def _item(node: t.Node, indent: int, depth: int) -> Lines:
    pad = " " * indent
    if isinstance(node, dict) and node:
        lines = block(node, indent + 2, depth)
        first = next(lines)
        if first.lstrip().startswith("{{-"):
            raise ValueError(f"an item begins with what may not be there: {first}")
        yield from chain([f"{pad}- {first.lstrip()}"], lines)
    else:
        yield f"{pad}- {_inline(node, depth)}"


def _presence(node: t.Node, depth: int) -> str | None:
    """The condition under which anything is there at all; None if something always is."""
    if isinstance(node, t.Given):
        return f'not (kindIs "invalid" {expression(node.value, depth)})'
    if isinstance(node, t.Each):
        return expression(node.of, depth)
    if isinstance(node, t.When):
        return _presence_of_choice(node, depth)
    if not isinstance(node, dict | list) or not node:
        return None
    found: list[str] = []
    for key, below in node.items() if isinstance(node, dict) else ((None, item) for item in node):
        if isinstance(below, t.When) and _never(below):
            continue
        condition = expression(key.of, depth) if isinstance(key, t.Entries) else _presence(below, depth)
        if condition is None:
            return None
        found.append(condition)
    return _joined("or", found)


def _presence_of_choice(node: t.When, depth: int) -> str | None:
    condition, then = expression(node.condition, depth), _presence(node.then, depth)
    first = condition if then is None else _joined("and", [condition, then])
    if node.otherwise is None:
        return first
    otherwise = _presence(node.otherwise, depth)
    if otherwise is None:
        return None if then is None else _joined("or", [f"(not {condition})", first])
    second = otherwise if then is None else _joined("and", [f"(not {condition})", otherwise])
    return _joined("or", [first, second])


def _joined(word: str, conditions: list[str]) -> str:
    if len(conditions) == 1:
        return conditions[0]
    return " ".join([word, *(part if part.startswith(("(", "$")) else f"({part})" for part in conditions)])


def _never(node: t.When) -> bool:
    return isinstance(node.condition, t.Param) and node.condition.name in PYTHONS_ALONE


def _inline(node: t.Node, depth: int) -> str:
    """A value in the text."""
    if isinstance(node, str | int | dict | list):
        text = json.dumps(node)
        return text[1:-1] if isinstance(node, str) and _is_plain(node) else text
    return f"{{{{ {_bare(expression(node, depth))} | toJson }}}}"


def _is_plain(text: str) -> bool:
    return text.replace("-", "a").replace("/", "a").replace(".", "a").isalnum() and text[0].isalpha()


def _bare(text: str) -> str:
    """An expression without the parentheses around all of it."""
    return text[1:-1] if text.startswith("(") else text


def expression(node: t.Node, depth: int = 0) -> str:
    """A value as an expression, in parentheses where it has several words."""

    def inner(nodes: tuple[t.Node, ...]) -> str:
        return " ".join(expression(below, depth) for below in nodes)

    match node:
        case bool() | str() | int():
            return json.dumps(node)
        case t.Ref(path):
            return f"$.run.{path}"
        case t.Param(name):
            return f"$.{name}"
        case t.Key():
            return f"$key{depth}"
        case t.Item(key):
            return f"$item{depth}" if key is None else f"$item{depth}.{key}"
        case t.Format(text, arguments):
            words = " ".join(_whole(below, depth) for below in arguments)
            return f"(printf {json.dumps(text.replace('%s', '%v'))} {words})"
        case t.Call(function, arguments):
            made = f'(include "ortflow.{function}" (list {inner(arguments)})'
            return f"{made} | int64)" if FUNCTIONS[function].__annotations__["return"] == "int" else f"{made})"
        case t.Product(factors):
            return f"(mul {inner(factors)})"
        case t.Sum(terms):
            return f"(add {inner(terms)})"
        case t.Is(value, str() as other):
            return f"(eq {expression(value, depth)} {json.dumps(other)})"
        case t.Is(value, other):
            return f"(eq (int64 {expression(value, depth)}) {other})"
        case t.Not(value):
            return f"(not {expression(value, depth)})"
        case t.All(values):
            return f"(and {inner(values)})"
        case t.Some(values):
            return f"(or {inner(values)})"
        case t.First(values):
            return f"(coalesce {inner(values)})"
        case t.When(condition, then, otherwise) if otherwise is not None:
            return f"(ternary {inner((then, otherwise, condition))})"
        case list():
            return f"(list {inner(tuple(node))})"
    raise ValueError(f"{node} is not an expression of a template")


def _whole(node: t.Node, depth: int) -> str:
    """An argument of a format: Helm's whole numbers are floating-point ones."""
    text = expression(node, depth)
    whole = isinstance(node, t.Ref) and "int" in str([*steps(node.path)][-1][1].annotation)
    return f"(int64 {text})" if whole else text
