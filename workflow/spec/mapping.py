"""The run file's `columns`: which column, or slice of a column, fills a graph input.

Called by the checks of the run file and of the data. Must not import numpy or pyarrow: run files are also checked on
machines without them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ortflow.workflow.errors import UserError

_REFERENCE = re.compile(r"(?P<column>[^\[\]]+)(?:\[(?P<start>-?\d+)?:(?P<stop>-?\d+)?\])?")


@dataclass(frozen=True)
class ColumnReference:
    """A column and the slice [start:stop] of each sample's first axis; the whole sample if both are None."""

    column: str
    start: int | None = None
    stop: int | None = None

    @property
    def slice(self) -> slice:
        """The slice, with Python's semantics."""
        return slice(self.start, self.stop)

    @property
    def whole(self) -> bool:
        """Whether it is the whole sample."""
        return self.start is None and self.stop is None

    def __str__(self) -> str:
        if self.whole:
            return self.column
        start, stop = ("" if end is None else end for end in (self.start, self.stop))
        return f"{self.column}[{start}:{stop}]"


def parse_reference(text: str, location: str | None = None) -> ColumnReference:
    """Parse `column` or `column[start:stop]`, such as `tokens[:-1]`. Raises UserError at `location` otherwise."""
    match = _REFERENCE.fullmatch(text)
    if match is None or match["column"] != match["column"].strip():
        raise UserError(
            f"{text!r} is neither a column nor a slice of one", where=location, fix="write column or column[a:b]"
        )
    start, stop = (None if match[end] is None else int(match[end]) for end in ("start", "stop"))
    return ColumnReference(match["column"], start, stop)
