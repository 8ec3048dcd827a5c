"""The kinds of errors, each with the exit code that launchers act on.

Raised everywhere; converted to one sentence and an exit code only in `ortflow.cli` and the rank's `main`.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence

EXIT_DONE = 0
EXIT_FAILURE = 1
EXIT_USER = 2
EXIT_PREEMPTED = 75


class OrtflowError(Exception):
    """A failure that is not caused by the user's input: a launcher may retry from the newest checkpoint."""

    exit_code = EXIT_FAILURE


class CommunicationError(OrtflowError):
    """A call to other ranks failed, mostly because one of them has ended."""


class UserError(OrtflowError):
    """An error in the user's input; a retry cannot help.

    Parameters
    ----------
    what
        What is wrong.
    where
        File, key path or line.
    fix
        What to do. The three are joined to one sentence.
    """

    exit_code = EXIT_USER

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None) -> None:
        self.what, self.where, self.fix = what, where, fix
        super().__init__((f"{where}: " if where else "") + what + (f"; {fix}" if fix else ""))


class Faults(UserError):
    """Several errors in one input, all listed."""

    def __init__(self, faults: Sequence[UserError]) -> None:
        self.faults = tuple(faults)
        super().__init__("\n".join(str(fault) for fault in self.faults))


class EndedBySignal(OrtflowError):
    """A child process was ended by a signal from outside; retry."""


def check_signal(returncode: int, child: str) -> None:
    """Raise EndedBySignal if a child's exit status shows a signal from outside; `child` describes the child.

    A crash (SIGSEGV, SIGABRT, …) does not count: the same input causes it again.
    """
    # A shell reports 128 + N for its child.
    number = -returncode if returncode < 0 else returncode - 128
    if number not in _OUTSIDE or (returncode > 0 and number not in _BY_SHELLS):
        return
    memory = ": the machine may have been out of memory" if number == signal.SIGKILL else ""
    raise EndedBySignal(f"{child} was ended by {signal.Signals(number).name}{memory}")


def signal_name(number: int) -> str:
    """SIGKILL for 9; `signal 64` if it has no name. Pure."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


_BY_SHELLS = (signal.SIGTERM, signal.SIGKILL, signal.SIGINT)
_OUTSIDE = (
    *_BY_SHELLS, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGPIPE,
    signal.SIGXCPU,
)  # fmt: skip


class Preempted(OrtflowError):
    """The rank was asked to stop and has saved: restart it; this counts against no failure budget."""

    exit_code = EXIT_PREEMPTED
