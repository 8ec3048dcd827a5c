"""The layout of the run directory, which survives every attempt: pure paths and small records.

Used by launchers, ranks and readers. Must not import ONNX Runtime or MPI.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

from ortflow.workflow.run.record import ATTEMPTS, read_records
from ortflow.workflow.system.disk_space import short_write
from ortflow.workflow.system.files import open_regular, read_whole
from ortflow.workflow.system.own_files import TEMPORARY, name_start

OWN_FILES = re.compile(
    rf"""
    (run\.yaml | plan\.json | attempts\.jsonl(\.damaged)? | kubernetes\.json | \.(launcher|ranks|log replicator)\.lock
    | \.rendezvous-\d+(\.[0-9a-f]{{8}})? | program/(record\.json | changes\.diff | packages\.txt)
    | \.stop | \.not_back | \.lost_nodes | \.owner | \.run_supervisor | \.heartbeat
    | events/rank-\d{{4,}}\.jsonl(\.damaged)?
    | logs/(attempt-\d{{2,}}/)?[\w-]+\.log
    | graphs/(part-\d+/)?(\.?[\w.]+\.(onnx|safetensors) | (costs|division|graphs|(half_)?stages|start_from)\.json)
    | slurm/[\w-]+\.(sh|out|pkl)
    | \.launcher/([\w.-]+)?
    | kubernetes/(run\.yaml | files/.+)
    | tensorboard/events\.out\.tfevents\.[^/]+
    | sinks/.+
    | profile/.+
    | ([\w-]+/){{0,2}}{TEMPORARY}
    | (events|logs|logs/attempt-\d{{2,}}|graphs|graphs/part-\d+|slurm|kubernetes|kubernetes/files|program)/
    | (checkpoints|tensorboard|export|sinks|profile)/)
    """,
    re.VERBOSE,
)
"""Contents of a run directory before its first step."""


@dataclass(frozen=True)
class RunDir:
    """Paths of one run."""

    root: Path

    @property
    def run_file(self) -> Path:
        """The resolved run file."""
        return self.root / "run.yaml"

    @property
    def plan(self) -> Path:
        """The result of configure: layout, steps, batch sizes."""
        return self.root / "plan.json"

    @property
    def graphs(self) -> Path:
        """Training, evaluation and optimizer graphs, shared by all ranks."""
        return self.root / "graphs"

    @property
    def attempts(self) -> Path:
        """One JSON line when an attempt starts, and one when it ends."""
        return self.root / "attempts.jsonl"

    @property
    def lock(self) -> Path:
        """Locked by the launcher that owns the run."""
        return self.root / ".launcher.lock"

    @property
    def ranks_lock(self) -> Path:
        """Locked, shared, by every living rank."""
        return self.root / ".ranks.lock"

    @property
    def stop_request(self) -> Path:
        """Exists while a request to save and stop is pending."""
        return self.root / ".stop"

    @property
    def not_back(self) -> Path:
        """Who was told that the run has not come back after an attempt, so that nobody is told twice."""
        return self.root / ".not_back"

    @property
    def lost_nodes(self) -> Path:
        """Names of the simulated nodes that are lost, for the local launcher; one on a line."""
        return self.root / ".lost_nodes"

    @property
    def owner(self) -> Path:
        """Token of the generation of ranks that may write here."""
        return self.root / ".owner"

    @property
    def heartbeat(self) -> Path:
        """Touched by rank 0 at each point that all ranks must reach."""
        return self.root / ".heartbeat"

    @property
    def is_ours(self) -> bool:
        """Whether ortflow has created a run here; a single file run.yaml may be a user's.

        There must also be attempts, a cluster's record, or a lock and a run.yaml that names its own run directory.
        """
        if not self.run_file.is_file():
            return False
        if self.attempts.is_file() or (self.root / "kubernetes.json").is_file():
            return True
        return self.lock.is_file() and re.search(rb"^run_dir: ", read_whole(self.run_file), re.MULTILINE) is not None

    def events(self, rank: int) -> Path:
        """Events of a rank, in JSON lines."""
        return self.root / "events" / f"rank-{rank:04d}.jsonl"

    def log(self, attempt: int, rank: int) -> Path:
        """Standard output and error of a rank in an attempt."""
        return self.root / "logs" / f"attempt-{attempt:02d}" / f"rank-{rank:04d}.log"

    def launcher_log(self, attempt: int) -> Path:
        """Output of mpirun itself in an attempt."""
        return self.root / "logs" / f"attempt-{attempt:02d}" / "launcher.log"

    def read_attempts(self) -> list[dict[str, Any]]:
        """Every record, oldest first; invalid lines are skipped."""
        return read_records(self.attempts, ATTEMPTS)[0]

    def record_attempt(self, **fields: Any) -> None:
        """Append a record: `event` is start or end; an end has a `cause`. Raises OSError."""
        append_json_line(self.attempts, {"time": time.time(), **fields})


def relocated(path: str, old: str | None, root: Path) -> str:
    """The path of something in a run directory that was `old` and is `root` now. Pure."""
    if old is not None and Path(path).is_relative_to(old):
        return str(root / Path(path).relative_to(old))
    return path


def append_json_line(path: Path, record: dict[str, Any]) -> None:
    """Append one line in one write, so that two writers do not mix; all or nothing. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = (json.dumps(record, separators=(",", ":")) + "\n").encode()
    # With O_APPEND, no other write comes between the seek to the end and the write, except on NFS (open(2)).
    descriptor = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            # An incomplete line, left by a power failure or a full disk, must not become the start of this one.
            line = b"\n" + line
        written_bytes = os.write(descriptor, line)
        if written_bytes != len(line):
            start = os.fstat(descriptor).st_size - written_bytes
            os.ftruncate(descriptor, start)
            raise short_write(path, start + len(line))
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(descriptor)


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file atomically. Raises OSError that names the file."""
    with replacing(path) as file:
        file.write(data)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Replace `path` atomically at the end of the block: written beside it, fsynced, renamed; the folder is fsynced,
    too. In a `scratch_folder` nothing is fsynced.

    If the block raises, the old file stays. The user's umask applies. Raises OSError that names the file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    attempt = os.environ.get("ORTFLOW_ATTEMPT")
    made_by = f"a{attempt}-" if attempt and attempt.isdigit() else ""
    temporary = path.with_name(f".{name_start(path.name)}.{made_by}{os.urandom(4).hex()}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            with os.fdopen(descriptor, "wb") as file:
                yield file
                file.flush()
                if _outlives(path):
                    os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
        sync_directory(path.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def sync_directory(path: Path) -> None:
    """Make renames in a folder durable, unless it is removed anyway."""
    if not _outlives(path):
        return
    # fsync of a file does not make its name durable, fsync of its folder does (fsync(2)).
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_SCRATCH: ContextVar[tuple[Path, ...]] = ContextVar("scratch", default=())


@contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """A temporary folder, removed at the end of the block. Files that this thread writes there need not survive a power
    failure.
    """
    with TemporaryDirectory(prefix=prefix) as folder:
        before = _SCRATCH.set((*_SCRATCH.get(), Path(folder)))
        try:
            yield Path(folder)
        finally:
            _SCRATCH.reset(before)


def _outlives(path: Path) -> bool:
    """Whether a file is there after the process has ended."""
    return not any(path.is_relative_to(folder) for folder in _SCRATCH.get())
