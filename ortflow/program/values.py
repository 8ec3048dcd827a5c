"""Values that a program logs, as plain numbers and text."""

from __future__ import annotations

from typing import Any

from ortflow.program.errors import ProgramError

LONGEST_TEXT = 4096
"""Characters of a text that are logged."""
Plain = float | int | str | bool


def plain(name: str, value: Any) -> Plain:
    """Return a number or text; of an array or tensor with one element, that element (a GPU is waited for)."""
    if isinstance(value, str):
        return value[:LONGEST_TEXT]
    if isinstance(value, (float, int)):
        return value
    try:
        element = value.item()
    except AttributeError:
        raise ProgramError(f"run.log({name}=…) takes numbers and text, not {type(value).__name__}") from None
    except (ValueError, RuntimeError):
        raise ProgramError(
            f"run.log({name}=…) takes numbers and text, not a {type(value).__name__} of several elements"
        ) from None
    return element if isinstance(element, (float, int, str, bool)) else float(element)
