"""A run's values as the documents read them: what the run file says, over the defaults of the keys they look at.

The ConfigMap carries them, written exactly as Helm's `toRawJson` writes them, because their digest is in names.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from decimal import Decimal
from functools import cache, lru_cache
from typing import Any

_ESCAPES = {"\u2028": "\\u2028", "\u2029": "\\u2029"}


def lookup(values: Any, path: str) -> Any:
    """The value at a key path; None where it, or a section around it, is not there."""
    for key in _keys(path):
        if not isinstance(values, dict):
            return None
        values = values.get(key)
    return values


@cache
def _keys(path: str) -> tuple[str, ...]:
    return tuple(path.split("."))


def merged(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """What was given over the defaults; a key without a value is as good as no key."""
    found = _pruned(given)
    for key, default in defaults.items():
        value = found.get(key)
        if value is None:
            found[key] = default
        elif isinstance(default, dict) and isinstance(value, dict):
            found[key] = merged(default, value)
    return found


def _pruned(given: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _pruned(value) if isinstance(value, dict) else value for key, value in given.items() if value is not None
    }


def canonical(values: Any) -> str:
    """JSON with sorted keys, without blanks, numbers as Go's encoder writes them."""
    if isinstance(values, dict):
        return "{" + ",".join(f"{_text(key)}:{canonical(values[key])}" for key in sorted(values)) + "}"
    if isinstance(values, list | tuple):
        return "[" + ",".join(map(canonical, values)) + "]"
    if isinstance(values, str):
        return _text(values)
    if isinstance(values, float):
        return _number(values)
    return json.dumps(values)


@lru_cache(4096)
def _text(text: str) -> str:
    written = json.dumps(text, ensure_ascii=False)
    for letter, escape in _ESCAPES.items():
        written = written.replace(letter, escape)
    return written


def _number(number: float) -> str:
    if not math.isfinite(number):
        raise ValueError(f"{number} is not a number in JSON")
    if number == 0:
        return "-0" if math.copysign(1, number) < 0 else "0"
    shortest = repr(number)
    if 1e-6 <= abs(number) < 1e21:
        # The fewest digits that mean the number, and zeros.
        return format(Decimal(shortest), "f").removesuffix(".0")
    mantissa, _, exponent = shortest.partition("e")
    return f"{mantissa}e{int(exponent):+d}"
