"""The signal on which this process writes the stacks of its threads, if the run finds that it hangs."""

from __future__ import annotations

import faulthandler
import signal
import sys

OFFSET = 7
"""From the last real-time signal: glibc and debuggers use the first ones."""


def register_stacks() -> int | None:
    """Have faulthandler write the stacks on a signal, also while Python code cannot run; the signal's number.

    None where there are no real-time signals (macOS), standard error is closed, or the signal is the program's own.
    """
    last = getattr(signal, "SIGRTMAX", None)
    if last is None:
        return None
    number = int(last) - OFFSET
    if signal.getsignal(number) is not signal.SIG_DFL:
        return None
    try:
        faulthandler.register(number, file=sys.__stderr__ or 2, all_threads=True)
    except (OSError, ValueError, RuntimeError):
        return None
    return number
