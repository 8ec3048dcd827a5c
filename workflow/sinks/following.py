"""Reads the events of one attempt as rank 0 writes them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ortflow.workflow.run.record import EVENTS, parse


class Following:
    """The events that are new since the last call of `new`.

    A resumed run replaces its file without the steps that it repeats: then what has been read is skipped by its time.
    """

    def __init__(self, path: Path, attempt: int) -> None:
        self._path, self._attempt = path, attempt
        self._identity: tuple[int, int] | None = None
        self._position = 0
        self._time = self._skipped = 0.0

    def new(self) -> Iterator[dict[str, Any]]:
        """Events of the attempt that were written since, oldest first; none while there is no file."""
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                identity = (status.st_dev, status.st_ino)
                if identity != self._identity or status.st_size < self._position:
                    self._identity, self._position, self._skipped = identity, 0, self._time
                file.seek(self._position)
                data = file.read()
        except OSError:
            return
        complete_lines = data[: data.rfind(b"\n") + 1]
        self._position += len(complete_lines)
        for line in complete_lines.splitlines():
            event = parse(line, EVENTS)
            if event is not None and event.get("attempt") == self._attempt and event["time"] > self._skipped:
                self._time = event["time"]
                yield event
