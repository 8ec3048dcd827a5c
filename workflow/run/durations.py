"""How long something lasts in a run: "500 steps", "2 epochs", "1_000_000 samples", "2e9 tokens". Pure.

Fractions, because the rate of a step must not depend on how a number was rounded on the way.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, get_args

from ortflow.workflow.errors import UserError

Unit = Literal["steps", "epochs", "samples", "tokens"]
UNITS: tuple[Unit, ...] = get_args(Unit)
_TEXT = re.compile(r"(\d[\d_]{0,30}(?:\.\d{1,9})?(?:[eE]\d{1,2})?) +(step|epoch|sample|token)s?")


@dataclass(frozen=True)
class Duration:
    """An amount of one unit, above 0."""

    amount: Fraction
    unit: Unit

    def __str__(self) -> str:
        return f"{float(self.amount):g} {self.unit}"


def parse_duration(text: str) -> Duration:
    """Read a duration. Raises UserError."""
    match = _TEXT.fullmatch(text.strip())
    if match is None:
        fix = "write a number with a unit, such as 500 steps, 2 epochs, 100_000 samples or 2e9 tokens"
        raise UserError(f"{text!r} is not a duration", fix=fix)
    amount, unit = Fraction(match[1].replace("_", "")), UNITS[[plural[:-1] for plural in UNITS].index(match[2])]
    if amount == 0:
        raise UserError(f"{text!r} is not above 0", fix="write a duration such as 500 steps")
    if unit == "steps" and amount.denominator != 1:
        raise UserError(f"{text!r} is not a whole number of steps", fix="write a duration such as 500 steps")
    return Duration(amount, unit)
