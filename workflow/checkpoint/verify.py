"""Check that a checkpoint is complete: its marker, its manifest, and size and hash of every file.

Called by `load`, by `commit` and by the command line. It only reads: it
must not change, move or delete anything, nor allocate memory for sizes from a file that is not verified.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import xxhash

from ortflow.workflow.checkpoint.checkpoint_names import MANIFEST, MARKER
from ortflow.workflow.checkpoint.manifest import Damaged, FileRecord, Manifest, decode, finished, format_of, mark
from ortflow.workflow.checkpoint.program import FORMAT as PROGRAM
from ortflow.workflow.checkpoint.program import ProgramManifest, decode_program
from ortflow.workflow.checkpoint.store import CheckpointStore
from ortflow.workflow.checkpoint.tensors import file_layout, file_name
from ortflow.workflow.errors import UserError
from ortflow.workflow.run.progress import Progress
from ortflow.workflow.system.files import open_regular, read_whole
from ortflow.workflow.system.threads import map_in_threads

CHUNK = 4 << 20
"""Bytes read and hashed at a time."""

LONGEST_MANIFEST = 256 << 20
"""Bytes: a longer file is not a manifest, and is not read."""

FILES_AT_ONCE = 4
"""Files read in parallel: network file systems are faster with several readers."""

OnReject = Callable[[Damaged], None]
"""Called with each file or folder for which a checkpoint is skipped."""

Views = Callable[[int, FileRecord], Iterable[memoryview]]
"""Memory for a rank's file, filled piece by piece."""


AnyManifest = Manifest | ProgramManifest


def read_manifest(store: CheckpointStore, step: int) -> Manifest:
    """The manifest of a committed checkpoint. Raises Damaged, and UserError for one of a program.

    Does not check the rank files.
    """
    manifest = read_any(store, step)
    if isinstance(manifest, ProgramManifest):
        raise UserError("is of a training program, which alone can read it", where=str(store.place(step)))
    return manifest


def read_any(store: CheckpointStore, step: int) -> AnyManifest:
    """The manifest of a committed checkpoint, of a program too. Raises Damaged. Does not check the files."""
    return read_folder(store.place(step), step)


def read_folder(folder: Path, step: int) -> AnyManifest:
    """As `read_any`, of the checkpoint of a step in any folder."""
    marker = _contents(folder / MARKER, missing="is missing: the save was never finished")
    data = _contents(folder / MANIFEST)
    try:
        manifest: AnyManifest
        if format_of(data) == PROGRAM:
            manifest = decode_program(data)
            if manifest.step != step:
                raise ValueError(f"is that of step {manifest.step}")
        else:
            manifest = decode(data)
            _check_sense(manifest, step)
    except ValueError as error:
        raise Damaged(folder / MANIFEST, str(error)) from None
    if marker != mark(data):
        raise Damaged(folder / MARKER, "does not contain the manifest's hash")
    return manifest


def check_sizes(store: CheckpointStore, manifest: AnyManifest) -> list[Damaged]:
    """Rank files that are missing or have a wrong size, determined without reading them."""
    faults = []
    for record in manifest.files:
        path = store.place(manifest.step) / record.name
        try:
            _check_size(path, path.stat().st_size, record)
        except Damaged as fault:
            faults.append(fault)
        except OSError as error:
            faults.append(_unreadable(path, error))
    return faults


def check_contents(store: CheckpointStore, manifest: Manifest, views: Views) -> list[Damaged]:
    """Read every rank file once, into `views`, and compare size and hash; returns the errors by file."""

    def check(rank: int) -> list[Damaged]:
        record = manifest.files[rank]
        path = store.place(manifest.step) / record.name
        header = file_layout(manifest.buffers, rank, manifest.world_size).header
        try:
            _read_file(path, record, header, views(rank, record))
        except Damaged as fault:
            return [fault]
        except OSError as error:
            return [_unreadable(path, error)]
        return []

    faults_of_ranks = map_in_threads(check, range(manifest.world_size), min(FILES_AT_ONCE, manifest.world_size))
    return [fault for faults in faults_of_ranks for fault in faults]


def verify(store: CheckpointStore, step: int) -> list[Damaged]:
    """Check everything about a checkpoint, and read all of it; returns the errors by file name."""
    try:
        manifest = read_any(store, step)
    except Damaged as fault:
        return [fault]
    if isinstance(manifest, ProgramManifest):
        return check_program(store, manifest)
    return check_contents(store, manifest, discarded)


def check_program(store: CheckpointStore, manifest: ProgramManifest) -> list[Damaged]:
    """Read every file of a program's checkpoint once, and compare size and hash; returns the errors by file."""

    def check(record: FileRecord) -> list[Damaged]:
        path = store.place(manifest.step) / record.name
        try:
            size, digest = hash_file(path)
            _check_size(path, size, record)
        except Damaged as fault:
            return [fault]
        except OSError as error:
            return [_unreadable(path, error)]
        return [] if digest == record.hash else [Damaged(path, "is corrupt: its hash differs from the manifest's")]

    faults_of_files = map_in_threads(check, manifest.files, FILES_AT_ONCE)
    return [fault for faults in faults_of_files for fault in faults]


def hash_file(path: Path, *, sync: bool = False) -> tuple[int, str]:
    """Size and hash of a file; `sync` also makes it durable. Raises OSError."""
    hashing, size = xxhash.xxh3_128(), 0
    with os.fdopen(open_regular(path), "rb", buffering=0) as file:
        if sys.platform == "linux":
            # Linux reads twice as far ahead then (posix_fadvise(2)).
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        scratch = memoryview(bytearray(CHUNK))
        while count := file.readinto(scratch):
            hashing.update(scratch[:count])
            size += count
        if sync:
            os.fsync(file.fileno())
    return size, finished(hashing)


def _check_sense(manifest: Manifest, step: int) -> None:
    if manifest.step != step:
        raise ValueError(f"is that of step {manifest.step}")
    reached = Progress.from_json(dict(manifest.progress)).step
    if reached != step:
        raise ValueError(f"has the progress of step {reached}")
    try:
        expected = [
            (file_name(rank), file_layout(manifest.buffers, rank, len(manifest.files)).size)
            for rank in range(len(manifest.files))
        ]
    except (KeyError, TypeError) as error:
        raise ValueError(f"describes no buffers: {error}") from None
    stated = [(record.name, record.size) for record in manifest.files]
    if manifest.world_size < 1 or len(stated) != manifest.world_size or stated != expected:
        raise ValueError("describes files that do not match its buffers")


def _read_file(path: Path, record: FileRecord, header: bytes, views: Iterable[memoryview]) -> None:
    hashing = xxhash.xxh3_128()
    with os.fdopen(open_regular(path), "rb", buffering=0) as file:
        _check_size(path, os.fstat(file.fileno()).st_size, record)
        # Other readers find the tensors by the header, and ortflow by the manifest: both must say the same.
        if os.pread(file.fileno(), len(header), 0) != header:
            raise Damaged(path, "has another header than the manifest describes")
        if sys.platform == "linux":
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        for view in views:
            position = 0
            while position < len(view):
                count = file.readinto(view[position:])
                if not count:
                    raise Damaged(path, "ends before its size")
                position += count
            hashing.update(view)
    if finished(hashing) != record.hash:
        raise Damaged(path, "is corrupt: its hash differs from the manifest's")


def _check_size(path: Path, size: int, record: FileRecord) -> None:
    if size != record.size:
        raise Damaged(path, f"has {size} bytes, the manifest says {record.size}")


def discarded(_: int, record: FileRecord) -> Iterator[memoryview]:
    """Views of a file whose contents are not kept."""
    scratch = memoryview(bytearray(min(CHUNK, record.size)))
    for start in range(0, record.size, CHUNK):
        yield scratch[: record.size - start]


def _contents(path: Path, missing: str = "is missing") -> bytes:
    try:
        return read_whole(path, LONGEST_MANIFEST)
    except FileNotFoundError:
        raise Damaged(path, missing) from None
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: OSError) -> Damaged:
    return Damaged(path, "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}")
