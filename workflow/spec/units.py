"""Amounts of memory and durations, as people and schedulers write them. Pure; launchers format them again."""

from __future__ import annotations

import re

from ortflow.workflow.errors import UserError

_MEMORY = re.compile(r"(\d{1,15}(?:\.\d{1,9})?) ?([kmgtp])(i?)b?", re.IGNORECASE)
_TIME = re.compile(r"(?:(\d{1,6})-)?(\d{1,6}):([0-5]?\d):([0-5]?\d)")


def parse_memory(text: str) -> int:
    """Bytes of 16G (10^9 each), 16Gi (2^30 each), 512M, 1.5T, 16GB. Raises UserError.

    The units are those of the SI and of IEC 80000-13, as in Kubernetes. Slurm's own `16G` means 16Gi.
    """
    match = _MEMORY.fullmatch(text.strip())
    if match is None:
        raise UserError(
            f"{text!r} is not an amount of memory", fix="write a number with a unit, such as 16G, 16Gi or 512M"
        )
    amount, unit, binary = match.groups()
    size = int(float(amount) * (1024 if binary else 1000) ** ("kmgtp".index(unit.lower()) + 1))
    if size == 0:
        raise UserError(f"{text!r} is not above 0", fix="write an amount of memory such as 16G")
    return size


def parse_time(text: str) -> int:
    """Seconds of [days-]hours:minutes:seconds, or of a plain number of minutes. Raises UserError."""
    text = text.strip()
    match = _TIME.fullmatch(text)
    if match is not None:
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    elif re.fullmatch(r"\d{1,9}", text):
        total = int(text) * 60
    else:
        fix = "write [days-]hours:minutes:seconds, such as 12:00:00 or 1-06:30:00, or a number of minutes"
        raise UserError(f"{text!r} is not a duration", fix=fix)
    if total == 0:
        raise UserError(f"{text!r} is not above 0", fix="write a time such as 12:00:00")
    return total
