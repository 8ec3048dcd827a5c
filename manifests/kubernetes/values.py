"""A run's values as in Helm: the run file's over the chart's defaults; and the text from which their digest is
computed.

The digest is part of names, so the text is exactly the output of Helm's `toRawJson`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from decimal import Decimal
from functools import cache
from typing import Any

from ortflow.workflow.spec.kubernetes import KubernetesBackend
from ortflow.workflow.spec.monitor import MonitorSection
from ortflow.workflow.spec.resources import Resources

# Go's encoder escapes them even with SetEscapeHTML(false), as in toRawJson: JavaScript before ES2019 ends a line there.
_ESCAPES = {"\u2028": "\\u2028", "\u2029": "\\u2029"}


@cache
def defaults() -> dict[str, Any]:
    """The defaults of every key that the documents are made from: the chart's values.yaml."""
    resources = Resources.model_construct()
    return {
        "backends": {"kubernetes": KubernetesBackend.model_construct().model_dump(exclude_none=True)},
        "monitor": {"tensorboard_directory": MonitorSection.model_construct().tensorboard_directory},
        "resources": {key: getattr(resources, key) for key in ("gpus_per_rank", "nodes", "ranks_per_node")},
    }


def with_defaults(source: Mapping[str, Any]) -> dict[str, Any]:
    """A run file's values over the defaults."""
    return merged(defaults(), source)


def merged(defaults: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The given values over the defaults; null counts as missing."""
    changes = _pruned(values)
    for key, default in defaults.items():
        value = changes.get(key)
        if value is None:
            changes[key] = default
        elif isinstance(default, dict) and isinstance(value, dict):
            changes[key] = merged(default, value)
    return changes


def _pruned(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _pruned(value) if isinstance(value, dict) else value for key, value in values.items() if value is not None
    }


def canonical(values: Any) -> str:
    """JSON with sorted keys, without blanks, and numbers as Go's encoder writes them."""
    if isinstance(values, dict):
        # Go sorts the keys by their bytes in UTF-8, which is the order of code points.
        return "{" + ",".join(f"{_text(key)}:{canonical(values[key])}" for key in sorted(values)) + "}"
    if isinstance(values, list | tuple):
        return "[" + ",".join(map(canonical, values)) + "]"
    if isinstance(values, str):
        return _text(values)
    if isinstance(values, float):
        return _number(values)
    return json.dumps(values)


def _text(text: str) -> str:
    literal = json.dumps(text, ensure_ascii=False)
    for letter, escape in _ESCAPES.items():
        literal = literal.replace(letter, escape)
    return literal


def _number(number: float) -> str:
    if not math.isfinite(number):
        raise ValueError(f"{number} is not a number in JSON")
    if number == 0:
        return "-0" if math.copysign(1, number) < 0 else "0"
    shortest = repr(number)
    # encoding/json writes an exponent outside of these bounds, as ES6 does, and without leading zeros.
    if 1e-6 <= abs(number) < 1e21:
        # The fewest digits that identify the number, and zeros.
        return format(Decimal(shortest), "f").removesuffix(".0")
    mantissa, _, exponent = shortest.partition("e")
    return f"{mantissa}e{int(exponent):+d}"
