"""Whether files still change, by one's own clock. Read only.

The times that stand in files are those of whoever wrote them, or of the machine that keeps the files: beside our own
clock they say nothing. That they move does.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

_Mark = tuple[int, int, int]


class Moves:
    """Watches files; the first look, when it is made, counts as a change."""

    def __init__(self, paths: Iterable[Path], now: float) -> None:
        self._marks = {path: _mark(path) for path in paths}
        self._moved = now

    def quiet(self, now: float) -> float:
        """Seconds since one of them was last seen to change; `now` is of a clock that only runs forward."""
        for path, before in self._marks.items():
            mark = _mark(path)
            if mark != before:
                self._marks[path], self._moved = mark, now
        return now - self._moved


def _mark(path: Path) -> _Mark | None:
    """What differs after a change; None where there is no such file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
