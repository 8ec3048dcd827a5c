"""An append-only file, unbuffered; records rejected by a full disk wait in memory until it has space.

Used for events and scalars: no step waits for disk space, and no rank fails for lack of it.
"""

from __future__ import annotations

import os
from collections import deque
from itertools import islice
from pathlib import Path

from ortflow.workflow.system.disk_space import is_full
from ortflow.workflow.system.files import open_regular

TOGETHER = 256
"""Largest number of records of one write."""


class BufferedFile:
    """Takes records in order. If more than `most` are waiting, the oldest are lost, and counted in `lost`."""

    def __init__(self, path: Path, most: int) -> None:
        self.path, self.lost = path, 0
        self._most = most
        self._waiting: deque[bytes] = deque()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW)

    def append(self, *records: bytes) -> None:
        """Write records after those that wait, or let them wait. Raises OSError, except for a full disk."""
        for record in records:
            self._waiting.append(record)
            if len(self._waiting) > self._most:
                # Not the first: part of it may be in the file.
                del self._waiting[1]
                self.lost += 1
        self.flush()

    def flush(self) -> bool:
        """Write waiting records as far as there is space; returns whether none is left. Raises OSError as `append`."""
        while self._waiting:
            try:
                byte_count = os.write(self._descriptor, b"".join(islice(self._waiting, TOGETHER)))
            except OSError as error:
                if not is_full(error):
                    raise OSError(error.errno, error.strerror, str(self.path)) from error
                return False
            while byte_count and byte_count >= len(self._waiting[0]):
                byte_count -= len(self._waiting.popleft())
            if byte_count:
                self._waiting[0] = self._waiting[0][byte_count:]
        return True

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def reopen(self) -> None:
        """Reopen the file, which must exist: another file may have replaced it."""
        self._descriptor = open_regular(self.path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
