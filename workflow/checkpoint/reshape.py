"""Rewrites a checkpoint: for another number of ranks, or as one file of named tensors.

Called by the command line. Needs neither numpy nor ONNX Runtime. Copies in pieces, so the required memory does not
depend on the size of the model. Every file is verified before anything is written.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any

import xxhash

from ortflow.workflow.checkpoint.checkpoint_names import MANIFEST
from ortflow.workflow.checkpoint.commit import commit, no_room
from ortflow.workflow.checkpoint.identity import Identity, difference
from ortflow.workflow.checkpoint.manifest import Damaged, FileRecord, Manifest, finished
from ortflow.workflow.checkpoint.store import CheckpointStore
from ortflow.workflow.checkpoint.tensors import ITEM_SIZES, file_layout, file_name, header_of
from ortflow.workflow.checkpoint.verify import CHUNK, read_manifest, verify
from ortflow.workflow.errors import OrtflowError, UserError
from ortflow.workflow.layout import share
from ortflow.workflow.run.rundir import replacing
from ortflow.workflow.system.disk_space import OutOfDisk, has_room, is_full, out_of_disk
from ortflow.workflow.system.files import open_regular

PARAMETERS = "parameters"
"""The buffer whose elements the index describes."""


def reshape(store: CheckpointStore, step: int, world_size: int, target: CheckpointStore) -> Manifest:
    """Write the checkpoint of a step to `target` as that of `world_size` ranks; its content is bit-identical.

    Raises
    ------
    Damaged
        If a file of the source is damaged or missing.
    UserError
        If `target` has a checkpoint of the step, files of others, or checkpoints of another run.
    OutOfDisk, OrtflowError
        If it cannot be written; nothing is left then.
    """
    manifest = _whole(store, step)
    if os.path.lexists(target.place(step)):
        raise UserError("exists", where=str(target.place(step)), fix="choose another --output, or remove it")
    _refuse_other_contents(target, manifest)
    new = not target.place(step).parent.exists()
    try:
        lack = no_room(target, manifest.buffers, world_size, manifest.index)
        if lack is not None:
            raise lack
        folder = target.begin(step, 0)
        records = [_write_rank(store, manifest, rank, world_size, folder) for rank in range(world_size)]
        return commit(
            target, step, 0, records, buffers=manifest.buffers, index=manifest.index, progress=manifest.progress,
            environment=manifest.environment, run=manifest.run,
        )  # fmt: skip
    except (OSError, OrtflowError) as error:
        with suppress(OSError):
            target.abandon(step, 0)
            if new:
                target.place(step).parent.rmdir()
        if isinstance(error, OrtflowError):
            raise
        raise _unwritable(target.place(step), error) from error


def merge(store: CheckpointStore, step: int, path: Path, *, moments: bool = False) -> int:
    """Write one safetensors file of named tensors; returns its size in bytes.

    A parameter or a running statistic has its name in the model. With `moments`, each moment of the optimizer is
    included as MOMENT/PARAMETER. Raises the same as `reshape`.
    """
    manifest = _whole(store, step)
    if os.path.lexists(path):
        raise UserError("exists", where=str(path), fix="choose another --output, or remove it")
    if any(entry.end > manifest.buffers[PARAMETERS].count for entry in manifest.index):
        raise Damaged(store.place(step) / MANIFEST, "has an index with tensors outside the parameters")
    rows = sorted(_tensors(manifest, moments), key=lambda row: -ITEM_SIZES[manifest.buffers[row[1]].dtype])
    places: dict[str, Any] = {"__metadata__": {"format": "ortflow", "step": str(step)}}
    size = 0
    for name, buffer, _, shape in rows:
        dtype = manifest.buffers[buffer].dtype
        end = size + prod(shape) * ITEM_SIZES[dtype]
        places[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [size, end]}
        size = end
    header = header_of(places)
    if not has_room(path.absolute(), len(header) + size):
        raise OutOfDisk(path, len(header) + size)
    try:
        with replacing(path.absolute()) as file:
            file.write(header)
            for _, buffer, start, shape in rows:
                for piece in pieces(store, manifest, buffer, start, start + prod(shape)):
                    file.write(piece)
    except OSError as error:
        raise _unwritable(path, error, len(header) + size) from error
    return len(header) + size


def pieces(store: CheckpointStore, manifest: Manifest, buffer: str, start: int, stop: int) -> Iterator[bytes]:
    """The bytes of elements [start, stop) of a flat buffer, read from the rank files. Raises OSError."""
    size = ITEM_SIZES[manifest.buffers[buffer].dtype]
    for rank in range(manifest.world_size):
        first, last = share(manifest.buffers[buffer].count, rank, manifest.world_size)
        first, last = max(first, start), min(last, stop)
        if first >= last:
            continue
        layout = file_layout(manifest.buffers, rank, manifest.world_size)
        span = next(span for span in layout.spans if span.buffer == buffer)
        with FileIO(open_regular(store.place(manifest.step) / file_name(rank))) as file:
            file.seek(span.offset + (first - span.start) * size)
            yield from _read(file, (last - first) * size)


def _read(file: FileIO, count: int) -> Iterator[bytes]:
    while count:
        piece = file.read(min(count, CHUNK))
        if not piece:
            raise OSError(errno.EIO, "has become shorter since it was verified", file.name)
        count -= len(piece)
        yield piece


def _write_rank(store: CheckpointStore, manifest: Manifest, rank: int, world_size: int, folder: Path) -> FileRecord:
    layout, hashing = file_layout(manifest.buffers, rank, world_size), xxhash.xxh3_128()

    def contents() -> Iterable[bytes]:
        yield layout.header
        for span in layout.spans:
            yield from pieces(store, manifest, span.buffer, span.start, span.stop)

    with replacing(folder / file_name(rank)) as file:
        for piece in contents():
            hashing.update(piece)
            file.write(piece)
    return FileRecord(file_name(rank), layout.size, finished(hashing))


def _tensors(manifest: Manifest, moments: bool) -> Iterator[tuple[str, str, int, tuple[int, ...]]]:
    """Name, buffer, first element and shape of each tensor of a merged file."""
    for entry in manifest.index:
        yield entry.name, PARAMETERS, entry.offset, entry.tensor.shape
    for buffer, spec in manifest.buffers.items():
        if not moments or buffer == PARAMETERS:
            continue
        if spec.count != manifest.index.trained:
            yield buffer, buffer, 0, (spec.count,)
            continue
        for entry in manifest.index:
            if entry.end <= spec.count:
                yield f"{buffer}/{entry.name}", buffer, entry.offset, entry.tensor.shape


def _refuse_other_contents(target: CheckpointStore, manifest: Manifest) -> None:
    """Raise UserError if the folder has something else than checkpoints of the same run."""
    foreign = target.foreign()
    if foreign is not None:
        raise UserError(
            f"contains other files than checkpoints ({foreign.name})", where=str(foreign.parent),
            fix="choose a new folder as --output",
        )  # fmt: skip
    run = Identity.from_json(manifest.run)
    for step in target.steps():
        try:
            reason = None if run is None else difference(read_manifest(target, step), run)
        except Damaged:
            continue
        if reason is not None:
            raise UserError(reason, where=str(target.place(step)), fix="choose another --output")


def _whole(store: CheckpointStore, step: int) -> Manifest:
    manifest = read_manifest(store, step)
    for fault in verify(store, step):
        raise fault
    return manifest


def _unwritable(path: Path, error: OSError, size: int = 0) -> OrtflowError:
    if is_full(error):
        return out_of_disk(error, size, path)
    return OrtflowError(f"cannot write {error.filename or path}: {error.strerror}")
