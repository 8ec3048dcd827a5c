"""Errors in a run file: first with a key path, then also with file and line.

The pure checks yield `Problem`s; `Document.fault` converts each to the `Fault` that the user sees.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ortflow.workflow.errors import UserError

KeyPath = tuple[str | int, ...]

COMMAND_LINE = 0
"""Line number of values from the command line."""


@dataclass(frozen=True)
class Problem:
    """An error in the value at `path`."""

    path: KeyPath
    what: str
    fix: str | None = None
    line: int | None = None
    """Its line, if that is not the line of `path`."""
    others: tuple[KeyPath, ...] = ()
    """Other keys it depends on: if one of them is wrong itself, this problem may be a consequence."""

    def hangs_on(self, path: KeyPath) -> bool:
        """Whether it depends on `path`, on a key inside it, or on a section around it."""
        return any(dependency[: len(path)] == path[: len(dependency)] for dependency in (self.path, *self.others))


class Fault(UserError):
    """A problem of a run file with its position; `line` is None for the whole file."""

    def __init__(self, problem: Problem, file: str, line: int | None) -> None:
        self.file, self.line, self.key = file, line, dotted(problem.path)
        if line == COMMAND_LINE:
            place = ["on the command line", self.key]
            location = ", ".join(part for part in place if part)
        else:
            place = [printable(file) if line is None else f"{printable(file)}:{line}", self.key]
            location = " ".join(part for part in place if part)
        super().__init__(printable(problem.what), where=location, fix=printable(problem.fix) if problem.fix else None)


def dotted(path: KeyPath) -> str:
    """The key path as text: `train.optimizer.betas[0]`."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{printable(part)}" for part in path)
    return "".join(parts).removeprefix(".")


def parse_dotted(text: str) -> KeyPath:
    """Parse the key path that `dotted` wrote; a key that contains dots becomes several."""
    parts = re.findall(r"[^.\[\]]+", text)
    return tuple(int(part) if f"[{part}]" in text and part.isdigit() else part for part in parts)


def printable(text: str) -> str:
    """Escape text from a file so that it is safe to print on one line of a terminal."""
    return text if text.isprintable() else repr(text)[1:-1]


def nearest(word: str, names: Iterable[str]) -> str | None:
    """The known word that `word` is most likely a misspelling of."""
    by_lower = {name.lower(): name for name in names}
    matches = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[matches[0]] if matches else None


def listed(words: Iterable[str]) -> str:
    """`a, b or c`."""
    *most, last = words
    return f"{', '.join(most)} or {last}" if most else last


def shown(value: Any) -> str:
    """A value for use in a sentence: its kind and, if short, its text."""
    if isinstance(value, str):
        text = value if len(value) <= 40 else value[:37] + "..."
        return f"the text {text!r}"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        # Python cannot convert an int of thousands of digits to text.
        return "a very large number" if isinstance(value, int) and abs(value) > 10**30 else repr(value)
    if value is None:
        return "nothing"
    return "a list" if isinstance(value, list | tuple) else "a mapping"
