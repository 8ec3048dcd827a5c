"""Writes TensorBoard's scalars; scalars rejected by a full disk are kept, and no step waits.

The format is that of TensorBoard's event files: records of tensorflow.Event, each framed by its length and checksums
(https://www.tensorflow.org/tutorials/load_data/tfrecord). Messages and checksum are tensorboardX's.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from ortflow.workflow.system.buffered_file import BufferedFile
from ortflow.workflow.system.imports import without_package

MOST_OWED = 100_000
"""Largest number of records that wait for space on a full disk; older ones are lost."""
MANY = 8
"""Rows that are made into records together."""


class ScalarLog:
    """A new file in `folder`; scalars of earlier files from step `purge` on are invalidated.

    Those of `period` seconds are written together: checksums in Python and a write for each step took up to 3% of a
    step of 5 ms, with caches that hold other data. What has not been written is lost if the process is killed; so call
    `flush` before a checkpoint, behind which no step is repeated.
    """

    def __init__(self, folder: Path, purge: int, *, period: float = 0.0) -> None:
        with without_package("torch"):
            from tensorboardX.crc32c import crc32c
            from tensorboardX.proto.event_pb2 import Event, SessionLog
            from tensorboardX.proto.summary_pb2 import Summary
        self._checksum, self._event, self._summary = crc32c, Event, Summary
        # TensorBoard reads files with `tfevents` in their names.
        self.path = folder / f"events.out.tfevents.{int(time.time())}.{os.getpid()}.{socket.gethostname()}"
        self._file = BufferedFile(self.path, MOST_OWED)
        self._period, self._written = period, time.time()
        self._waiting: list[tuple[tuple[str, ...], tuple[float, int, tuple[float, ...]]]] = []
        start = SessionLog(status=SessionLog.START)
        first = Event(wall_time=time.time(), file_version="brain.Event:2")
        self._append([first, Event(wall_time=time.time(), step=purge, session_log=start)])

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Write the scalars of a step, by name, now or with later ones."""
        self.add_row(step, tuple(values), tuple(values.values()))

    def add_row(self, step: int, names: tuple[str, ...], values: tuple[float, ...]) -> None:
        """As `add`. After a step whose computation has filled the caches, a dict takes ten times a tuple's time."""
        now = time.time()
        self._waiting.append((names, (now, step, values)))
        if abs(now - self._written) >= self._period:  # also if the clock was put back
            self.flush()

    def flush(self) -> None:
        """Write what waits."""
        self._written = time.time()
        waiting, self._waiting = self._waiting, []
        for names, group in groupby(waiting, key=lambda entry: entry[0]):
            rows = [row for _, row in group]
            if len(rows) < MANY:
                self._append([self._message(names, *row) for row in rows])
            else:
                from ortflow.workflow.run.scalar_rows import records  # numpy, which only ranks have

                self._file.append(*records(names, rows))

    def _message(self, names: tuple[str, ...], wall: float, step: int, values: tuple[float, ...]) -> Any:
        pairs = zip(names, values, strict=True)
        value = [self._summary.Value(tag=name, simple_value=value) for name, value in pairs]
        return self._event(wall_time=wall, step=step, summary=self._summary(value=value))

    def _append(self, events: Sequence[Any]) -> None:
        self._file.append(*(self._record(event.SerializeToString()) for event in events))

    def _record(self, record: bytes) -> bytes:
        length = struct.pack("<Q", len(record))
        return length + _masked(self._checksum(length)) + record + _masked(self._checksum(record))

    def close(self) -> None:
        """Close the file."""
        self.flush()
        self._file.close()


def _masked(crc: int) -> bytes:
    """A checksum in the file's form: rotated, and moved by a constant."""
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)
