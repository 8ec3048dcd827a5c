"""Whether files still change, by one's own clock. Read only.

The times that stand in files are those of whoever wrote them, or of the machine that keeps the files: beside our own
clock they say nothing. That they move does.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ortflow.workflow.rundir import RunDir

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


class Liveness:
    """Whether the ranks of an attempt hang: none of what they write has moved for `limit` seconds."""

    def __init__(self, run: RunDir, number: int, world_size: int, limit: float, now: float) -> None:
        self._limit = limit
        self._nearest = Moves((run.heartbeat, run.events(0), run.launcher_log(number)), now)
        self._others = Moves(map(run.events, range(1, world_size)), now)
        self._looked = self._others_moved = now

    def hung(self, now: float) -> bool:
        """Asked at a moment of the clock that `now` was of; moments must not run backward."""
        # Rank 0 waits for all others, so theirs are looked at seldom: there may be a thousand.
        if now >= self._looked + self._limit / 20:
            self._looked, self._others_moved = now, now - self._others.quiet(now)
        return min(self._nearest.quiet(now), now - self._others_moved) > self._limit


def _mark(path: Path) -> _Mark | None:
    """What differs after a change; None where there is no such file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
