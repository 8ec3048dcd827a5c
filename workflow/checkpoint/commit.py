"""Rank 0's part of a save: check the disk space, and commit the files of all ranks as a checkpoint.

`commit` fsyncs and may read an old checkpoint, so it may run in a separate thread; it must not communicate with ranks.
"""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ortflow.workflow.checkpoint.checkpoint_names import MANIFEST, MARKER
from ortflow.workflow.checkpoint.manifest import FileRecord, Manifest, mark
from ortflow.workflow.checkpoint.store import CheckpointStore
from ortflow.workflow.checkpoint.tensors import PAGE, BufferSpec, file_layout
from ortflow.workflow.checkpoint.verify import verify
from ortflow.workflow.errors import OrtflowError
from ortflow.workflow.layout import FlatIndex
from ortflow.workflow.run.rundir import write_atomically
from ortflow.workflow.system.disk_space import RECORDS, OutOfDisk, is_full, out_of_disk


class SaveFailed(OrtflowError):
    """A save failed; its files are removed, and earlier checkpoints are unchanged."""


def no_room(
    store: CheckpointStore, buffers: Mapping[str, BufferSpec], world_size: int, index: FlatIndex
) -> OutOfDisk | OSError | None:
    """Why a save of all ranks does not fit on the disk; None if it does."""
    # Direct writes fill whole pages, before a file is cut to its size.
    files = sum(_pages(file_layout(buffers, rank, world_size).size) for rank in range(world_size))
    needed_bytes = files + _pages(len(json.dumps(index.to_json()))) + RECORDS
    folder = store.place(0).parent
    try:
        free_bytes = store.free_bytes()
    except OSError as error:
        return out_of_disk(error, needed_bytes, folder) if is_full(error) else error
    return None if free_bytes >= needed_bytes else OutOfDisk(folder, needed_bytes)


def _pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


def commit(
    store: CheckpointStore,
    step: int,
    attempt: int,
    records: Sequence[FileRecord],
    *,
    buffers: Mapping[str, BufferSpec],
    index: FlatIndex,
    progress: Mapping[str, Any],
    environment: Mapping[str, str],
    run: Mapping[str, str] = MappingProxyType({}),
) -> Manifest:
    """Write the manifest of all ranks' files (`records`, by rank) and commit them as the checkpoint of `step`.

    A complete checkpoint of the same step is replaced, a damaged one renamed. `progress` is plain JSON data,
    `environment` the result of `ortflow.workflow.run.recorded_environment`,
    `run` the record of an `Identity`.
    Raises SaveFailed, with the temporary files removed.
    """
    manifest = Manifest(step, len(records), buffers, index, progress, tuple(records), time.time(), environment, run)
    data = manifest.encode()
    try:
        folder = store.begin(step, attempt)
        for record in records:
            if (folder / record.name).stat().st_size != record.size:
                raise OSError(errno.EIO, "does not have the size that its rank wrote", str(folder / record.name))
        write_atomically(folder / MANIFEST, data)
        if (store.place(step) / MARKER).exists() and verify(store, step):
            store.set_aside(step, attempt)
        store.commit(step, attempt, mark(data))
    except OSError as error:
        store.abandon(step, attempt)
        path = error.filename or store.place(step)
        raise SaveFailed(f"checkpoint of step {step}: {path}: {error.strerror}") from error
    return manifest
