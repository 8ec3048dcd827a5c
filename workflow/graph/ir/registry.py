"""Tables of rules by operator, which modules fill when they are imported."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import TypeVar

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

    def enter(rule: Rule) -> Rule:
        for operator in operators:
            assert (domain, operator) not in rules
            rules[domain, operator] = rule
        return rule

    return enter
