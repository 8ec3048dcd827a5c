"""The copy of a run's records on the client's side, taken from the logs of its launcher pods.

Each call continues where the last one ended, in any process: `kubernetes.json` stores the position, and lines of an
interrupted copy are removed first. Pods may vanish and logs may be rotated in between; lines that a new launcher
pod repeats are recognized by their content. Must not write to a real run directory.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ortflow.launchers.attempts.locks import HeldError, hold
from ortflow.launchers.attempts.tail import last_records
from ortflow.launchers.kubernetes import objects
from ortflow.launchers.kubernetes.api import Cluster, Object, Refused, Unread
from ortflow.launchers.kubernetes.lines import Line, Record, read_line, stamped
from ortflow.launchers.kubernetes.place import Cursor, Place, is_real, read_place, write_place
from ortflow.workflow.run.events import discard_lost, find_lost, line_of_save
from ortflow.workflow.run.rundir import RunDir, append_json_line, write_atomically
from ortflow.workflow.system.disk_space import Notice, OutOfDisk

LOCK = ".log_replicator.lock"
POD_OUTPUT = Path("logs") / "launcher.log"
"""The messages of supervisor processes."""
KEEP = 1.0
"""Seconds of copying after which the cursor is saved."""


class LogReplicator:
    """The record directory of one run; created for each copy."""

    def __init__(self, run: RunDir, cluster: Cluster) -> None:
        self._run, self._cluster = run, cluster
        self._files: dict[str, Any] = {}
        self._lock: int | None = None
        self._attempts: list[dict[str, Any]] = []
        self._events = Newest([])
        self._unread: set[str] = set()

    def sync(self, pods: Sequence[Object]) -> frozenset[str]:
        """Copy what the launcher pods among `pods` have printed since the last call.

        Returns the uids of those whose log cannot be read now.
        """
        with suppress(HeldError), self:  # another process is copying
            for pod in objects.of_role(pods, "launcher"):
                self._take(pod, follow=False)
        return frozenset(self._unread)

    def follow(self, pod: Object) -> None:
        """Copy a launcher pod's lines as they come, until it ends."""
        with suppress(HeldError), self:
            self._take(pod, follow=True)

    def __enter__(self) -> LogReplicator:
        if not is_real(self._run):
            self._lock = hold(self._run.root / LOCK)
            self._undo()
            self._attempts = self._run.read_attempts()
            self._events = Newest(last_records(self._run.events(0)))
        return self

    def __exit__(self, *exception: object) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _place(self) -> Place:
        place = read_place(self._run)
        assert place is not None, "a record directory knows where its run is"
        return place

    def _undo(self) -> None:
        """Remove lines beyond the cursors."""
        for name, size in self._place().sizes.items():
            path = self._run.root / name
            with suppress(OSError):
                if not path.is_symlink() and path.stat().st_size > size:
                    os.truncate(path, size)

    def _take(self, pod: Object, *, follow: bool) -> None:
        if self._lock is None:
            return
        place = self._place()
        cursor = place.cursors.get(objects.uid(pod)) or Cursor(objects.name(pod), begun=False)
        if cursor.done or not objects.has_begun(pod):
            return
        over = objects.has_ended(pod)
        since = f"{cursor.time[:19]}Z" if cursor.time else None
        try:
            pieces = self._cluster.log(
                objects.name(pod), objects.container_name(pod), place.namespace, since=since, follow=follow
            )
            due = time.monotonic() + KEEP
            for stamp, text in fresh(whole_lines(self._flushed(pieces), rest=over or follow), cursor):
                cursor = replace(cursor, time=stamp, lines=cursor.lines + 1 if stamp == cursor.time else 1)
                line = read_line(text)
                if isinstance(line, Record) and line.file == "attempts":
                    cursor = replace(cursor, begun=True)
                place = self._write(line, place)
                if time.monotonic() >= due:
                    due = time.monotonic() + KEEP
                    place = self._keep(place, pod, cursor)
        except Refused as error:
            # The pod or its container is gone: its output is lost.
            if error.code not in (400, 404):
                raise
            over = over or error.code == 404
        except Unread:
            # It is read when the node answers again; the others must not wait for it.
            self._unread.add(objects.uid(pod))
            over = False
        self._keep(place, pod, replace(cursor, done=over))

    def _flushed(self, pieces: Iterable[bytes]) -> Iterator[bytes]:
        """The pieces; what was copied of one is visible to readers while the next is waited for."""
        for piece in pieces:
            yield piece
            for file in self._files.values():
                file.flush()

    def _keep(self, place: Place, pod: Object, cursor: Cursor) -> Place:
        sizes = dict(place.sizes)
        for name, file in self._files.items():
            file.flush()
            sizes[name] = file.tell()
        place = replace(place, cursors={**place.cursors, objects.uid(pod): cursor}, sizes=sizes)
        write_place(self._run, place)
        return place

    def _write(self, line: Line, place: Place) -> Place:
        if isinstance(line, Record):
            return self._record(line, place)
        path = POD_OUTPUT if line.rank is None else self._run.log(place.attempt, line.rank).relative_to(self._run.root)
        name = str(path)
        if name not in self._files:
            target = self._run.root / path
            target.parent.mkdir(parents=True, exist_ok=True)
            self._files[name] = target.open("ab")
        self._files[name].write(line.text.encode() + b"\n")
        return place

    def _record(self, line: Record, place: Place) -> Place:
        record, run = line.record, self._run
        if line.file == "plan":
            write_atomically(run.plan, json.dumps(record).encode())
        elif line.file == "notice":
            lacking(run, record)
        elif line.file == "events":
            if self._events.takes(record, again=line.again):
                if record.get("event") == "rewind":
                    rewind(run, int(record["to_step"]), to_save=record.get("to_save") is True)
                append_json_line(run.events(0), record)
        else:
            if record.get("event") == "start":
                place = replace(place, attempt=int(record["attempt"]))
            if record.get("event") == "submit" and record.get("job"):
                place = place.at(str(record["job"]))
            if record not in self._attempts:
                self._append(record)
        return place

    def _append(self, record: dict[str, Any]) -> None:
        records = [earlier for earlier in self._attempts if not _superseded(earlier, record)]
        if len(records) < len(self._attempts):
            text = "".join(json.dumps(earlier, separators=(",", ":")) + "\n" for earlier in records)
            write_atomically(self._run.attempts, text.encode())
        append_json_line(self._run.attempts, record)
        self._attempts = [*records, record]


def rewind(run: RunDir, step: int, *, to_save: bool = False) -> None:
    """Remove events of steps after `step`, as the rank has done in its own record."""
    with suppress(FileNotFoundError):
        start = line_of_save(run.events(0), step) if to_save else None
        if find_lost(run.events(0), step, start).newest is not None:
            discard_lost(run.events(0), step, start)


def lacking(run: RunDir, record: Mapping[str, Any]) -> None:
    """Record the space that the run lacks on its volume, or that it lacks none, for `status`."""
    notice = Notice(run.heartbeat)
    if record:
        notice.report(OutOfDisk(Path(str(record["path"])), int(record["needed"])))
    else:
        notice.clear()


class Newest:
    """The newest known events: a new launcher pod repeats the last ones. Pure.

    The clock of a rank may be set back while it runs, so times are compared only for repeated events.
    """

    def __init__(self, records: Sequence[dict[str, Any]]) -> None:
        self._attempt, self._time = -1, 0.0
        self._seen: set[str] = set()
        """Of the newest attempt."""
        for record in records:
            self.takes(record)

    def takes(self, record: dict[str, Any], *, again: bool = False) -> bool:
        """Whether the event is new; it is known from then on. `again`: another pod may have reported it."""
        attempt, time = int(record.get("attempt", 0)), float(record.get("time", 0.0))
        text = json.dumps(record, sort_keys=True)
        if attempt < self._attempt or text in self._seen:
            return False
        if attempt == self._attempt and again and time < self._time:
            return False
        if attempt > self._attempt:
            self._seen.clear()
        self._seen.add(text)
        self._attempt, self._time = attempt, time
        return True


def _superseded(own_record: dict[str, Any], new_record: dict[str, Any]) -> bool:
    """Whether the run's own record, at its right place, now replaces our record of a submission."""
    return (
        new_record.get("event") == own_record.get("event") == "submit"
        and own_record.get("job") == new_record.get("job")
        and "submission" not in own_record
    )


def whole_lines(pieces: Iterable[bytes], *, rest: bool) -> Iterator[bytes]:
    """Lines of a text that comes in chunks; an unfinished last line only with `rest`. Pure."""
    tail = b""
    for piece in pieces:
        *lines, tail = (tail + piece).split(b"\n")
        yield from lines
    if rest and tail:
        yield tail


def fresh(lines: Iterable[bytes], cursor: Cursor) -> Iterator[tuple[str, str]]:
    """Time and text of the lines after the cursor: the API server filters by seconds, lines have nanoseconds. Pure."""
    skip = cursor.lines
    for line in lines:
        stamp = stamped(line)
        if stamp is None or stamp[0] < cursor.time:
            continue
        if stamp[0] == cursor.time and skip:
            skip -= 1
            continue
        yield stamp
