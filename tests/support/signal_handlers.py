"""Signal handlers in tests: a supervisor never restores them, because it is the last task of its process."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def restored(*numbers: signal.Signals) -> Iterator[None]:
    """Restore the handlers of these signals after the block."""
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)
