"""The order in which the ranks of this machine ended. Linux only.

Hydra also names a process: the first in the kernel's list of its dead children. It kills the others as soon as one has
closed its connection, and a busy machine may let any of them be gone before that one. A rank closes its log before
that connection, so the order in which the logs were closed is that in which the ranks ended.
benchmarks/killed_ranks.py counts how often each is right.
"""

from __future__ import annotations

import ctypes
import os
import re
import struct
import sys
from pathlib import Path

IN_CLOSE_WRITE = 0x8
_EVENT = struct.Struct("iIII")
"""Of the kernel's inotify_event: watch, mask, cookie, and length of the name behind it in bytes."""
_READ = 1 << 16
"""Bytes read at once: hundreds of events."""


class Exits:
    """Watches the folder with the logs of an attempt, until `close`. Ranks that started before are missing.

    Parameters
    ----------
    logs
        The folder, in which each rank opens rank-NNNN.log. If it cannot be watched, the order stays empty.
    """

    def __init__(self, logs: Path) -> None:
        self._order: list[int] = []
        self._events = _watch(logs) if sys.platform == "linux" else -1

    def order(self) -> list[int]:
        """Ranks that have ended, the first one first."""
        while self._events >= 0:
            try:
                events = os.read(self._events, _READ)
            except BlockingIOError:
                break
            self._order += [rank for rank in _closed(events) if rank not in self._order]
        return list(self._order)

    def close(self) -> None:
        """Stop watching; `order` stays valid."""
        self.order()
        if self._events >= 0:
            os.close(self._events)
            self._events = -1


def _watch(folder: Path) -> int:
    """Descriptor of the events; -1 if the kernel has none to spare or cannot watch this file system."""
    library = ctypes.CDLL(None)
    events = int(library.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
    if events >= 0 and library.inotify_add_watch(events, os.fsencode(folder), IN_CLOSE_WRITE) < 0:
        os.close(events)
        return -1
    return events


def _closed(events: bytes) -> list[int]:
    """Ranks whose logs were closed, in the kernel's order. Pure."""
    ranks, place = [], 0
    while place < len(events):
        length = _EVENT.unpack_from(events, place)[3]
        place += _EVENT.size
        name = events[place : place + length].rstrip(b"\0")
        place += length
        if match := re.fullmatch(rb"rank-(\d+)\.log", name):
            ranks.append(int(match[1]))
    return ranks
