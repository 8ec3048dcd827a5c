"""Checks of messages: what they name and how to fix it, not their sentences."""

from __future__ import annotations

from collections.abc import Sequence


def mentions(text: str, *parts: str) -> bool:
    """Whether a text contains all parts, in this order."""
    place = 0
    for part in parts:
        place = text.find(part, place)
        if place < 0:
            return False
        place += len(part)
    return True


def alike(messages: Sequence[str], expected: Sequence[str]) -> bool:
    """Whether each message is the expected one; `KEY: … FIX` stands for any sentence between the two."""
    return len(messages) == len(expected) and all(
        message == wanted if "…" not in wanted else mentions(message, *wanted.split(" … "))
        for message, wanted in zip(messages, expected, strict=True)
    )
