"""Tables of rules by operator, which modules fill when they are imported."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import TypeVar

Key = TypeVar("Key")
Rule = TypeVar("Rule")


def registered_in(
    rules: MutableMapping[tuple[str, str], Rule], *operators: str, domain: str = ""
) -> Callable[[Rule], Rule]:
    """Return a decorator that adds a rule to a table.

    Parameters
    ----------
    rules
        (Domain, operator) -> rule. No operator has two.
    operators
        Operators of the domain that the rule is for.
    domain
        ONNX's own by default.
    """

    return entered_in(rules, *((domain, operator) for operator in operators))


def entered_in(rules: MutableMapping[Key, Rule], *keys: Key) -> Callable[[Rule], Rule]:
    """Return a decorator that adds a rule to a table under these keys, none of which has one."""

    def enter(rule: Rule) -> Rule:
        for key in keys:
            assert key not in rules
            rules[key] = rule
        return rule

    return enter
