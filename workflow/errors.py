"""The few kinds of error there are, each with the exit code a launcher acts on.

Raised everywhere, turned into one sentence and an exit code at the edge only (`ortflow.cli`, the rank's `main`).
"""

from __future__ import annotations

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


class Preempted(OrtflowError):
    """The rank was asked to leave and has saved: run again, against no failure budget."""

    exit_code = EXIT_PREEMPTED
