"""Amounts as Kubernetes writes them. Pure."""

from __future__ import annotations

import re

_UNITS = {
    "": 1.0, "n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18,
    "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50, "Ei": 2.0**60,
}  # fmt: skip
_FORM = re.compile(r"([+-]?[0-9.]+(?:[eE][+-]?\d+)?)([numkKMGTPE]?i?)")


def parse(text: object) -> float:
    """The value of an amount; 0 if it is invalid."""
    match = _FORM.fullmatch(str(text))
    return float(match[1]) * _UNITS.get(match[2], 1.0) if match else 0.0


def show(resource: str, amount: float) -> str:
    """An amount of a resource for messages."""
    if "memory" in resource or "storage" in resource:
        return f"{amount / 2**30:.3g}Gi"
    return f"{amount:g}"
