"""Checks of messages: what they name and how to fix it, not their sentences."""

from __future__ import annotations

import re
from collections.abc import Sequence


def mentions(text: str, *parts: str) -> bool:
    """Whether a text contains all parts, in this order; … in a part stands for any words.

    A number does not match a part of a longer one.
    """
    pieces = [piece.strip() for part in parts for piece in part.split("…")]
    return re.search(".*?".join(_exactly(piece) for piece in pieces if piece), text, re.DOTALL) is not None


def says(text: str, expected: str) -> bool:
    """Whether a text is the expected one; in `KEY: … VALUE … FIX`, each … stands for any words.

    A text that is expected to begin with a key path begins with it.
    """
    if "…" not in expected:
        return text == expected
    first, *rest = expected.split("…")
    return text.startswith(first.strip()) and mentions(text[len(first.strip()) :], *rest)


def alike(messages: Sequence[str], expected: Sequence[str]) -> bool:
    """Whether each message says what is expected of it."""
    return len(messages) == len(expected) and all(map(says, messages, expected))


def _exactly(part: str) -> str:
    before, after = ("(?<!\\d)" if part[:1].isdigit() else ""), ("(?!\\d)" if part[-1:].isdigit() else "")
    return before + re.escape(part) + after
