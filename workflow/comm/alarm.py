"""A limit for calls into C that hold Python's lock: the kernel ends the process."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

PATIENCE = 10
"""Seconds for MPI to finalize or abort."""


@contextlib.contextmanager
def ended_after(seconds: int) -> Iterator[None]:
    """End the process by SIGALRM if the block takes longer. For the main thread."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
