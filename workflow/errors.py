"""The few kinds of error there are, each with the exit code a launcher acts on.

Raised everywhere, turned into one sentence and an exit code at the edge only (`ortflow.cli`, the rank's `main`).
"""

from __future__ import annotations

import signal
from collections.abc import Sequence

EXIT_DONE = 0
EXIT_FAILURE = 1
EXIT_USER = 2
EXIT_PREEMPTED = 75


class OrtflowError(Exception):
    """Something failed that is nobody's input: a launcher may try again from the newest checkpoint."""

    exit_code = EXIT_FAILURE


class UserError(OrtflowError):
    """The user's input is wrong; trying again cannot help.

    `what` is wrong, `where` (file, key path, line), and what to do (`fix`): joined into one clear sentence.
    """

    exit_code = EXIT_USER

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None) -> None:
        self.what, self.where, self.fix = what, where, fix
        super().__init__((f"{where}: " if where else "") + what + (f"; {fix}" if fix else ""))


class Faults(UserError):
    """Several faults of one input, all listed."""

    def __init__(self, faults: Sequence[UserError]) -> None:
        self.faults = tuple(faults)
        super().__init__("\n".join(str(fault) for fault in self.faults))


class EndedBySignal(OrtflowError):
    """A process that did part of the work was ended from outside: nobody's input, and to be tried again."""


def check_signal(returncode: int, what: str) -> None:
    """Raise EndedBySignal where a child's exit status is that of a signal from outside; `what` was at work.

    A crash (SIGSEGV, SIGABRT, …) is none: the same input brings it about again.
    """
    # A shell says 128 + N for what it started.
    number = -returncode if returncode < 0 else returncode - 128
    if number not in _OUTSIDE or (returncode > 0 and number not in _BY_SHELLS):
        return
    memory = ": the machine may have been out of memory" if number == signal.SIGKILL else ""
    raise EndedBySignal(f"{what} was ended by {signal.Signals(number).name}{memory}")


_BY_SHELLS = (signal.SIGTERM, signal.SIGKILL, signal.SIGINT)
_OUTSIDE = (
    *_BY_SHELLS, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGPIPE,
    signal.SIGXCPU,
)  # fmt: skip


class Preempted(OrtflowError):
    """The rank was asked to leave and has saved: run again, against no failure budget."""

    exit_code = EXIT_PREEMPTED
