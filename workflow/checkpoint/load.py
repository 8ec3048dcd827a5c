"""Filling memory from a checkpoint: one pass that reads, hashes and places every byte.

Called by all ranks when a run resumes, and by the export of a checkpoint. Any number of ranks may have written it.
Rank 0 decides which checkpoint it is (`load_newest`); the others `load` that step and verify what they read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
import numpy.typing as npt

from ortflow.workflow.checkpoint.manifest import Damaged, FileRecord, Manifest
from ortflow.workflow.checkpoint.store import CheckpointStore
from ortflow.workflow.checkpoint.tensors import ITEM_SIZES, file_layout
from ortflow.workflow.checkpoint.verify import CHUNK, OnReject, check_contents, check_sizes, read_manifest
from ortflow.workflow.checkpoint.writer import DTYPES
from ortflow.workflow.errors import UserError
from ortflow.workflow.layout import FlatIndex

Array = npt.NDArray  # type: ignore[type-arg]


@dataclass(frozen=True)
class Loaded:
    """A checkpoint in memory: whole flat buffers in host arrays, by name."""

    manifest: Manifest
    buffers: Mapping[str, Array]


def load(
    store: CheckpointStore,
    step: int,
    out: Mapping[str, Array] | None = None,
    *,
    index: FlatIndex | None = None,
    partial: bool = False,
) -> Loaded:
    """Read the checkpoint of a step; into `out` (one-dimensional arrays, by buffer name) if given.

    Buffers that `out` does not name are verified and not kept. With an `index` training goes on from it: the
    checkpoint must then hold exactly the buffers of `out`, or more with `partial`, and the same tensors at the same
    places.
    Raises Damaged, and then `out` may be half filled; UserError if the checkpoint is of something else.
    """
    manifest = read_manifest(store, step)
    for fault in check_sizes(store, manifest):
        raise fault
    buffers = _allocate(manifest) if out is None else out
    difference = _difference(manifest, buffers, index, partial)
    if difference is not None:
        raise UserError(
            difference,
            where=str(store.place(step)),
            fix="go on with the model and the optimizer it was saved with, or start a new run",
        )
    targets = {name: array.data.cast("B") for name, array in buffers.items() if array.size}

    def views(rank: int, _: FileRecord) -> Iterator[memoryview]:
        return _views(manifest, rank, targets)

    for fault in check_contents(store, manifest, views):
        raise fault
    return Loaded(manifest, buffers)


def load_newest(
    store: CheckpointStore,
    out: Mapping[str, Array] | None = None,
    on_reject: OnReject | None = None,
    *,
    index: FlatIndex | None = None,
    partial: bool = False,
) -> Loaded | None:
    """Read the newest whole checkpoint, as `load` does; each one passed over is reported; None if there is none.

    If something was rejected and nothing loaded, `out` may be half filled.
    """
    for step in reversed(store.steps()):
        found = _load_or_reject(store, step, out, on_reject, index, partial)
        if found is not None:
            return found
    return None


def _load_or_reject(
    store: CheckpointStore,
    step: int,
    out: Mapping[str, Array] | None,
    on_reject: OnReject | None,
    index: FlatIndex | None,
    partial: bool,
) -> Loaded | None:
    try:
        return load(store, step, out, index=index, partial=partial)
    except Damaged as fault:
        if on_reject:
            on_reject(fault)
        return None


def _views(manifest: Manifest, rank: int, targets: Mapping[str, memoryview]) -> Iterator[memoryview]:
    layout = file_layout(manifest.buffers, rank, manifest.world_size)
    yield memoryview(bytearray(len(layout.header)))
    scratch: memoryview | None = None
    for span in layout.spans:
        size = span.end - span.offset
        first = span.start * ITEM_SIZES[manifest.buffers[span.buffer].dtype]
        for start in range(0, size, CHUNK):
            length = min(CHUNK, size - start)
            if span.buffer in targets:
                yield targets[span.buffer][first + start : first + start + length]
            else:
                scratch = scratch or memoryview(bytearray(CHUNK))
                yield scratch[:length]


def _allocate(manifest: Manifest) -> dict[str, Array]:
    return {name: np.empty(spec.count, DTYPES[spec.dtype]) for name, spec in manifest.buffers.items()}


def _difference(manifest: Manifest, out: Mapping[str, Array], index: FlatIndex | None, partial: bool) -> str | None:
    """Why the checkpoint does not go into `out`; None if it does."""
    for name, array in out.items():
        spec = manifest.buffers.get(name)
        if spec is None:
            return f"the checkpoint has no {name}, only {', '.join(manifest.buffers)}"
        if np.dtype(DTYPES[spec.dtype]) != array.dtype or spec.count != array.size:
            return (
                f"{name} is {spec.count} elements of {np.dtype(DTYPES[spec.dtype])} in the checkpoint "
                f"and {array.size} of {array.dtype} here"
            )
    if index is None:
        return None
    more = [name for name in manifest.buffers if name not in out]
    if more and not partial:
        return f"the checkpoint also has {', '.join(more)}"
    for saved, here in zip_longest(manifest.index, index):
        if saved != here:
            name = (here or saved).name
            return f"tensor {name} has another shape, group or place than in the checkpoint"
    return None
