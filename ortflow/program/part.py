"""A program's part in its run: when to stop, where checkpoints are, how one is committed, what is logged.

`context()` makes one object in each process. Without ortflow the same calls work on this process alone: it stops on
SIGTERM, and checkpoints are folders below ./checkpoints.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ortflow.program.checks import Checks
from ortflow.program.errors import CommitFailed, ProgramError, RunLost
from ortflow.program.values import plain
from ortflow.program.world import World, world
from ortflow.workflow.program.wire import ADDRESS_VARIABLE, TOKEN_VARIABLE

if TYPE_CHECKING:
    from pathlib import Path

    from ortflow.program.link import Link
    from ortflow.program.profile import Profiler
    from ortflow.program.trace import Tracer


class Context:
    """This process's part in the run.

    Attributes
    ----------
    rank, world_size, local_rank
        This process's place among those of the run.
    attempt
        How often the run was started before.
    position
        The number of steps done, as last reported.
    """

    def __init__(self, link: Link | None, checks: Checks, place: World) -> None:
        self._link, self._checks = link, checks
        self.rank, self.world_size, self.local_rank = place
        self._place = place
        self.position = 0
        self._in_step = 0
        """1 while `steps` has a step in progress: the position is that of the steps done."""
        self._total: int | None = None
        self._deadline: float | None = None
        hello = self._link.hello if self._link is not None else {}
        self.attempt: int = hello.get("attempt", 0)
        self._period: dict[str, Any] = hello.get("period") or {}
        self._newest: str | None = hello.get("newest_path")
        self._tracer: Tracer | None = None
        if hello.get("prove"):
            from ortflow.program.trace import tracer

            self._tracer = tracer(hello, self.rank)
        self._profiler: Profiler | None = None
        if hello.get("profile"):
            from ortflow.program.profile import Profiler

            self._profiler = Profiler(hello["profile"], self.rank, self.world_size)
        if self._link is not None:
            self._link.position = lambda: (self.position, self._checks.count)
            self._link.deadline = self._set_deadline
            self._set_deadline(hello.get("seconds_left"))
            if hello.get("stop") is not None:
                self._checks.stop_now(hello["stop"])

    def _set_deadline(self, seconds: float | None) -> None:
        self._deadline = None if seconds is None else time.monotonic() + seconds

    @property
    def should_stop(self) -> bool:
        """Whether to save and end, now: true from the same reading on, on every rank. Read it once a step."""
        if self._forked:
            return False
        return self._checks.begin()[0]

    @property
    def stop_reason(self) -> str | None:
        """Why the run stops; None if nobody has asked."""
        return self._checks.reason

    @property
    def seconds_left(self) -> float | None:
        """Seconds until this process is killed; None if no end is known."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    @property
    def checkpoint_dir(self) -> Path:
        """The folder of the run's checkpoints."""
        from pathlib import Path

        from ortflow.program import alone

        return Path(alone.FOLDER).absolute() if self._link is None else Path(self._link.hello["checkpoints"])

    def latest(self) -> Path | None:
        """Return the newest checkpoint that is complete and whole; None if there is none."""
        from pathlib import Path

        from ortflow.program import alone

        if self._link is None:
            return alone.newest(self.checkpoint_dir)
        return None if self._newest is None else Path(self._newest)

    @contextlib.contextmanager
    def commit(self, step: int) -> Iterator[Path]:
        """Yield a folder in which every rank writes its files of the checkpoint after `step` steps.

        Every rank calls it for the same step. When all have left the block, the folder becomes the checkpoint. If one
        raised an error or has ended, nothing is committed, and CommitFailed is raised on the others.
        """
        from pathlib import Path

        if self._forked:
            raise ProgramError("a process that was forked from the rank's cannot commit a checkpoint")
        if self._link is None:
            from ortflow.program import alone

            with alone.commit(self.checkpoint_dir, step, self._place) as path:
                yield path
            return
        begun = time.perf_counter()
        path = Path(self._committing({"kind": "begin_commit", "step": step})["path"])
        try:
            yield path
        except BaseException as error:
            with contextlib.suppress(ProgramError):
                text = f"rank {self.rank}: {type(error).__name__}: {error}"[:4096]
                self._link.request({"kind": "end_commit", "step": step, "error": text})
            raise
        self._newest = self._committing({"kind": "end_commit", "step": step, "error": None})["path"]
        if self._tracer is not None:
            self._tracer.committed()
        if self._profiler is not None:
            self._profiler.saved(begun)

    def _committing(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._link is not None
        try:
            return self._link.request(message)
        except RunLost:
            raise
        except ProgramError as error:
            raise CommitFailed(f"the checkpoint of step {message['step']} was not made: {error}") from None

    def log(self, *, step: int | None = None, **values: Any) -> None:
        """Record numbers and text of a step (by default the one in progress), such as loss and tokens.

        A tensor on a GPU is waited for. Raises ProgramError if a value is not one number or text.
        """
        numbers = {name: plain(name, value) for name, value in values.items()}
        if self._tracer is not None:
            self._tracer.log(numbers)
        if self._link is not None and not self._forked:
            self._link.log(self.position + self._in_step if step is None else step, numbers)

    def step(self, step: int | None = None) -> None:
        """Report that a step is done, for speed and hang detection; `step` is the number of steps done so far."""
        self.position = self.position + 1 if step is None else step
        if self._tracer is not None:
            self._tracer.after(self.position)
        if self._profiler is not None:
            self._profiler.done(self.position)
            self._profiler.begin(self.position + 1)

    @property
    def total(self) -> int | None:
        """The declared number of steps. A program that ends before it without being asked has failed."""
        return self._total

    @total.setter
    def total(self, steps: int) -> None:
        if steps != self._total:
            self._total = steps
            self._tell({"kind": "total", "steps": steps})

    def finished(self) -> None:
        """Report that the program has done all it should, whatever its total."""
        self._tell({"kind": "finished"})

    def _tell(self, message: dict[str, Any]) -> None:
        if self._link is not None and not self._forked:
            self._link.tell(message)

    @property
    def _forked(self) -> bool:
        return self._link is not None and not self._link.here


_current: Context | None = None


def current() -> Context:
    """Return the process's context; made at the first call. Raises ProgramError."""
    global _current
    if _current is None:
        _current = Context(*connect(level=1))
        if _current._tracer is not None:
            _current._tracer.watch_modules()
    return _current


def replace_current(context: Context) -> None:
    """Return this context from now on."""
    global _current
    _current = context


def connect(level: int) -> tuple[Link | None, Checks, World]:
    """Connect to the rank process that started this program, if one did. Raises ProgramError."""
    place, checks = world(), Checks()
    # Programs that this one starts are not ranks of the run.
    address, token = os.environ.pop(ADDRESS_VARIABLE, ""), os.environ.pop(TOKEN_VARIABLE, "")
    if address:
        from ortflow.program.link import Link

        return Link(address, token, place, level, checks), checks, place
    from ortflow.program.stop_signals import StopSignals

    StopSignals(checks.stop_now).install()
    return None, checks, place
