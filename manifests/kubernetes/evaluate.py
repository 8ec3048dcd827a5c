"""A document from its tree and a run's values. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ortflow.manifests.kubernetes import tree as t
from ortflow.manifests.kubernetes.functions import FUNCTIONS
from ortflow.manifests.kubernetes.values import lookup

ABSENT = object()
"""What a condition left out."""


@dataclass(frozen=True)
class Scope:
    """What the nodes of a tree refer to."""

    values: Mapping[str, Any]
    """The run file's, with defaults."""
    params: Mapping[str, Any]
    key: Any = None
    item: Any = None


def evaluate(node: t.Node, scope: Scope) -> Any:
    """The value of a node; ABSENT where its condition does not hold."""
    kind = type(node)
    if kind is dict:
        return _mapping(node, scope)
    if kind is list:
        return _list(node, scope)
    compute = _NODES.get(kind)
    return node if compute is None else compute(node, scope)


def _mapping(node: dict[Any, t.Node], scope: Scope) -> Any:
    found: dict[str, Any] = {}
    for key, below in node.items():
        if isinstance(key, str):
            value = evaluate(below, scope)
            if value is not ABSENT:
                found[key] = value
        elif isinstance(key, t.Entries):
            for inner in _each(key.of, scope):
                found[evaluate(key.key, inner)] = evaluate(below, inner)
        else:
            value = evaluate(below, scope)
            if value is not ABSENT:
                found[evaluate(key, scope)] = value
    return found if found or not node else ABSENT


def _list(node: list[t.Node], scope: Scope) -> Any:
    found: list[Any] = []
    for item in node:
        if isinstance(item, t.Each):
            found += [value for inner in _each(item.of, scope) if (value := evaluate(item.item, inner)) is not ABSENT]
        else:
            value = evaluate(item, scope)
            if value is not ABSENT:
                found.append(value)
    return found if found or not node else ABSENT


def _each(of: t.Node, scope: Scope) -> Iterator[Scope]:
    values = evaluate(of, scope) or ()
    pairs = sorted(values.items()) if isinstance(values, Mapping) else enumerate(values)
    for key, item in pairs:
        yield replace(scope, key=key, item=item)


def _when(node: t.When, scope: Scope) -> Any:
    if evaluate(node.condition, scope):
        return evaluate(node.then, scope)
    return ABSENT if node.otherwise is None else evaluate(node.otherwise, scope)


def _given(node: t.Given, scope: Scope) -> Any:
    value = evaluate(node.value, scope)
    return ABSENT if value is None else value


def _first(node: t.First, scope: Scope) -> Any:
    return next((found for value in node.values if (found := evaluate(value, scope))), None)


def _product(node: t.Product, scope: Scope) -> int:
    product = 1
    for factor in node.factors:
        product *= int(evaluate(factor, scope))
    return product


_NODES: dict[type, Callable[[Any, Scope], Any]] = {
    t.Ref: lambda node, scope: lookup(scope.values, node.path),
    t.Param: lambda node, scope: scope.params[node.name],
    t.Key: lambda node, scope: scope.key,
    t.Item: lambda node, scope: scope.item if node.key is None else scope.item.get(node.key),
    t.Format: lambda node, scope: node.text % tuple(evaluate(value, scope) for value in node.arguments),
    t.Call: lambda node, scope: FUNCTIONS[node.function](*[evaluate(value, scope) for value in node.arguments]),
    t.Product: _product,
    t.Sum: lambda node, scope: sum(int(evaluate(term, scope)) for term in node.terms),
    t.Is: lambda node, scope: evaluate(node.value, scope) == node.other,
    t.Not: lambda node, scope: not evaluate(node.value, scope),
    t.All: lambda node, scope: all(evaluate(value, scope) for value in node.values),
    t.Some: lambda node, scope: any(evaluate(value, scope) for value in node.values),
    t.First: _first,
    t.When: _when,
    t.Given: _given,
}
