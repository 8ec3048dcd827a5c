"""The order in which the ranks of this machine ended. Linux only; ranks that were not watched in time are missing.

Hydra also names a process: the first in the kernel's list of its dead children. A rank of some GB takes long to die,
so in up to a quarter of cases Hydra names another one, which it has killed itself in the meantime.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
from typing import Any


class Exits:
    """Watches processes from `add` until `close`."""

    def __init__(self) -> None:
        self._ranks: dict[int, int] = {}
        self._order: list[int] = []
        self._events: Any = None  # select.epoll, which macOS lacks

    def add(self, rank: int, pid: int) -> None:
        """Watch the process of this rank; no effect if it has ended or no descriptor is free."""
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                self._events = self._events or select.epoll()
                descriptor = os.pidfd_open(pid)
                self._ranks[descriptor] = rank
                # Report each only once: a second report would change the order.
                self._events.register(descriptor, select.EPOLLIN | select.EPOLLET)

    def order(self) -> list[int]:
        """Ranks that have ended, the first one first."""
        while self._events is not None and (ready := self._events.poll(0)):
            self._order += [self._ranks[descriptor] for descriptor, _ in ready]
        return list(self._order)

    def close(self) -> None:
        """Stop watching; `order` stays valid."""
        self.order()
        if self._events is not None:
            self._events.close()
            self._events = None
        while self._ranks:
            os.close(self._ranks.popitem()[0])
