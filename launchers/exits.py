"""In which order the ranks of this machine ended. Linux; nothing is known elsewhere, or of ranks not watched in time.

Hydra names a process, too: the first in the kernel's list of its dead children. A rank of some GB takes long to die,
and in up to a quarter of cases Hydra names another one, which it has killed itself in the meantime.
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
        """Watch the process of this rank; in vain where it is gone, or descriptors have run out."""
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                self._events = self._events or select.epoll()
                descriptor = os.pidfd_open(pid)
                self._ranks[descriptor] = rank
                # Once each, or the order is lost with the second look.
                self._events.register(descriptor, select.EPOLLIN | select.EPOLLET)

    def order(self) -> list[int]:
        """Ranks that have ended, the first one first."""
        while self._events is not None and (ready := self._events.poll(0)):
            self._order += [self._ranks[descriptor] for descriptor, _ in ready]
        return list(self._order)

    def close(self) -> None:
        """Watch no longer; `order` stays."""
        self.order()
        if self._events is not None:
            self._events.close()
            self._events = None
        while self._ranks:
            os.close(self._ranks.popitem()[0])
