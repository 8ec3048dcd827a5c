"""The shared memory of an MPI: files in /dev/shm that it removes only when all ranks exit normally.

MPICH's names are removed as soon as all ranks have mapped the segments, so that a kill leaves nothing (`Start.done`).
The next rank on a machine removes what else a killed rank left: what MPI created while it started, what MPICH creates
for a moment when a collective is first used, what UCX creates for a moment, and all segments of Open MPI, which may
open its files by name later. Each rank lists its segments in a record in /dev/shm, written before its MPI starts. The
rank holds a lock on the record, so that its death is visible in every container that sees the folder, whatever its
process id is there. No clock is read. The record also names Open MPI's session folder (see `daemon_files`). Linux only;
elsewhere there is nothing to find.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ortflow.workflow.comm import daemon_files

FOLDER = Path("/dev/shm")
SETTLE = 0.2
"""Seconds within which a process that starts MPI maps the segments that it has created."""
_PASSING = ("mpich_shar_tmp", "ucx_shm_posix_")
"""Segments that MPICH and its UCX may name for a moment at any time, until they are mapped."""
_SEGMENT = r"(?:mpich_shm_|mpich_shar_tmp|ucx_shm_posix_|vader_segment\.|sm_segment\.)[\w.\-]+"
_NAME = re.compile(_SEGMENT)
_MAPPED = re.compile(rf"/({_SEGMENT})(?: \(deleted\))?$", re.MULTILINE)
_RECORD = re.compile(r"ortflow_mpi_\d+_[0-9a-f]{16}")


@dataclass(frozen=True)
class _Record:
    """What a rank recorded before its MPI started, and afterwards."""

    path: Path
    alive: bool
    before: frozenset[str]
    """The segments that existed before."""
    mapped: frozenset[str] | None
    """The segments that it needs by name; None until its MPI has started."""
    session: str
    """Open MPI's session folder; empty if there is none."""

    def left(self, existing: frozenset[str]) -> frozenset[str]:
        """Those of the existing segments that may be its own."""
        new = existing - self.before
        if self.mapped is None:
            return new
        return (existing & self.mapped) | {name for name in new if name.startswith(_PASSING)}


class Start:
    """A rank's record: exists from before MPI starts until no segment of the rank can be left."""

    def __init__(self, folder: Path = FOLDER) -> None:
        """Create the record, and remove what dead ranks left; both as far as the folder permits."""
        self._folder, self.descriptor = folder, -1
        self._before = sorted(_there(folder))
        self._path = folder / f"ortflow_mpi_{os.getuid()}_{os.urandom(8).hex()}"
        with suppress(OSError):
            self._begin()
        sweep(folder)

    def _begin(self) -> None:
        # Locked before it gets its name: nobody must see a running rank's record without the lock.
        temporary = self._path.with_name(f".{self._path.name}")
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write(descriptor, self._text())
            os.rename(temporary, self._path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            os.close(descriptor)
            raise
        self.descriptor = descriptor

    def _text(self, **lists: list[str]) -> str:
        record: dict[str, Any] = {"before": self._before, "session": daemon_files.own(), **lists}
        return json.dumps(record)

    def done(self) -> None:
        """Called when every rank of the machine has mapped its segments, and none opens MPICH's by name any more."""
        mapped = []
        for name in _mapped("self"):
            if name.startswith("mpich_"):
                with suppress(OSError):
                    (self._folder / name).unlink()
            else:
                mapped.append(name)
        if self.descriptor >= 0:
            with suppress(OSError):
                # A single write, and longer than what it overwrites: the record is complete at every moment.
                _write(self.descriptor, self._text(mapped=sorted(set(mapped))))
        daemon_files.remove_topologies()

    def close(self) -> None:
        """Remove the record: nothing of this rank's MPI is left."""
        if self.descriptor >= 0:
            self._path.unlink(missing_ok=True)
            os.close(self.descriptor)
            self.descriptor = -1


def _write(descriptor: int, text: str) -> None:
    """Write a record over a shorter one. Raises OSError without a change if the folder is full."""
    data = text.encode()
    # A write to a full folder ends in the middle.
    if sys.platform == "linux":
        os.posix_fallocate(descriptor, 0, len(data))
    os.pwrite(descriptor, data, 0)


def sweep(folder: Path = FOLDER) -> list[str]:
    """Remove the segments and the records of this user's dead ranks. Returns the names of the segments.

    A segment stays if a running process maps it, or if a running rank may have created it. Safe in several processes
    concurrently.
    """
    existing = _there(folder)
    records = list(_records(folder))
    dead = [record for record in records if not record.alive]
    if not dead:
        return []
    # Any segment that did not exist when a running rank began may belong to that rank.
    old = existing.intersection(*(record.before for record in records if record.alive and record.mapped is None))
    remaining = {record.path: record.left(existing) for record in dead}
    recorded = {name for record in dead for name in record.mapped or ()}
    gone = unmapped({name for names in remaining.values() for name in names if name in old or name in recorded})
    if gone:
        # Another program of this user may have created one just now, and will map it in a moment.
        time.sleep(SETTLE)
        gone = unmapped(gone)
    for name in gone:
        with suppress(OSError):
            (folder / name).unlink()
    used = {record.session for record in records if record.alive}
    ended = {record.session for record in dead if record.session} - used
    stay = {session for session in ended if not daemon_files.remove(session)} | (used - {""})
    for record in dead:
        # What may belong to another process, or is still mapped by a dead rank's child, is checked again at the next
        # start.
        if remaining[record.path] <= gone and record.session not in stay:
            with suppress(OSError):
                record.path.unlink()
    return sorted(gone)


def _there(folder: Path) -> frozenset[str]:
    """The segments of this user."""
    segments = set()
    with suppress(OSError):  # the folder cannot be read
        # Other programs may have thousands of files there, of which a `Path` each takes longer than MPI's start.
        for name in filter(_NAME.fullmatch, os.listdir(folder)):
            with suppress(OSError):
                if (folder / name).lstat().st_uid == os.getuid():
                    segments.add(name)
    return frozenset(segments)


def _records(folder: Path) -> Iterator[_Record]:
    """The records of this user. One that cannot be read is ignored and left in place."""
    for path in sorted(folder.glob(f"ortflow_mpi_{os.getuid()}_*")):
        if not _RECORD.fullmatch(path.name):
            continue
        with suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                if os.fstat(descriptor).st_uid != os.getuid():
                    continue
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    alive = False
                except BlockingIOError:
                    alive = True
                # Zeros are space that is not written yet.
                content = json.loads(os.pread(descriptor, 1 << 20, 0).rstrip(b"\0"))
                mapped = content.get("mapped")
                mapped_names = None if mapped is None else frozenset(mapped)
                session = str(content.get("session", ""))
                yield _Record(path, alive, frozenset(content["before"]), mapped_names, session)
            finally:
                os.close(descriptor)


def unmapped(names: set[str]) -> set[str]:
    if not names:
        return set()
    return names - {name for process in os.listdir("/proc") if process.isdigit() for name in _mapped(process)}


def _mapped(process: str) -> Iterator[str]:
    with suppress(OSError):
        yield from _MAPPED.findall(Path("/proc", process, "maps").read_text(errors="replace"))
