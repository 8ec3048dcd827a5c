"""The library's errors: the last line of the traceback is the sentence that ortflow shows as the cause."""

from __future__ import annotations


class ProgramError(RuntimeError):
    """The program and its run do not fit together; the message says what to do."""


class RunLost(ProgramError):
    """The rank process that started this program has ended, or closed the connection."""


class CommitFailed(ProgramError):
    """A checkpoint could not be completed on some rank: nothing was committed."""
