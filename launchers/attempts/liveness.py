"""Whether files still change, by the clock of this process. Read only.

The times of files come from their writer or from the file server, so they cannot be compared with the clock of this
process. Only their change is used.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ortflow.workflow.run.rundir import RunDir

START = 120.0
"""Least seconds that the ranks of an attempt have until their first heartbeat: Python and its packages may come from a
slow file server."""
_Mark = tuple[int, int, int]


class FileChanges:
    """Watches files; its creation counts as a change."""

    def __init__(self, paths: Iterable[Path], now: float) -> None:
        self._marks = {path: _mark(path) for path in paths}
        self._moved = now
        self.seen = False
        """Whether a change was seen after the creation."""

    def quiet(self, now: float) -> float:
        """Seconds since a change was last seen; `now` is by a monotonic clock."""
        for path, before in self._marks.items():
            mark = _mark(path)
            if mark != before:
                self._marks[path], self._moved, self.seen = mark, now, True
        return now - self._moved


class Liveness:
    """Whether the ranks of an attempt hang: none of their files has changed for `limit` seconds, or for `START` while
    they start."""

    def __init__(self, run: RunDir, number: int, world_size: int, limit: float, now: float) -> None:
        self._limit = limit
        self._launcher = FileChanges((run.launcher_log(number),), now)
        self._nearest = FileChanges((run.heartbeat, run.events(0)), now)
        self._others = FileChanges(map(run.events, range(1, world_size)), now)
        self._checked = self._others_moved = now

    def hung(self, now: float) -> str | None:
        """How they hang at a time of the same clock, None if they do not; times must not decrease."""
        # Rank 0 waits for all others, so their files are checked rarely: there may be a thousand.
        if now >= self._checked + self._limit / 20:
            self._checked, self._others_moved = now, now - self._others.quiet(now)
        quiet = min(self._nearest.quiet(now), self._launcher.quiet(now), now - self._others_moved)
        if self._nearest.seen or self._others.seen:
            return f"the ranks hung: no heartbeat for {self._limit:g} s" if quiet > self._limit else None
        limit = max(self._limit, START)
        return f"the ranks did not start: no heartbeat for {limit:g} s" if quiet > limit else None


def _mark(path: Path) -> _Mark | None:
    """A value that differs after a change; None if there is no such file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
