"""Load a checkpoint into memory, in one pass that reads, hashes and copies every byte.

Called by all ranks when a run resumes, and by the export of a checkpoint. Any number of ranks may have written it.
Rank 0 decides which checkpoint it is (`newest_matching`); then all ranks `load` that step and verify what they read.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import Any

import numpy as np
import numpy.typing as npt

from ortflow.workflow.checkpoint.manifest import Damaged, FileRecord, Manifest
from ortflow.workflow.checkpoint.store import CheckpointStore
from ortflow.workflow.checkpoint.tensors import ITEM_SIZES, Span, file_layout
from ortflow.workflow.checkpoint.verify import CHUNK, OnReject, check_contents, check_sizes, discarded, read_manifest
from ortflow.workflow.checkpoint.writer import DTYPES
from ortflow.workflow.device import Buffer
from ortflow.workflow.device.cpu import HostBuffer
from ortflow.workflow.device.shard import Shard
from ortflow.workflow.errors import UserError
from ortflow.workflow.layout import FlatIndex

Array = npt.NDArray  # type: ignore[type-arg]


@dataclass(frozen=True)
class Window:
    """Destination of elements [start, start + part.count) of a flat buffer of `count` elements."""

    part: Buffer
    start: int
    count: int

    @classmethod
    def over(cls, array: Array) -> Window:
        """An array for the whole buffer."""
        return cls(HostBuffer(array), 0, array.size)


def window_for(buffer: Buffer | Shard) -> Window:
    """The part of a buffer that this rank holds: files are read straight into it, or pass through a chunk of memory."""
    if isinstance(buffer, Shard):
        return Window(buffer.part, buffer.start, buffer.count)
    return Window(buffer, 0, buffer.count)


@dataclass(frozen=True)
class Loaded:
    """A checkpoint in memory: flat buffers as host arrays by name, or the parts on the host that windows select."""

    manifest: Manifest
    buffers: Mapping[str, Array]


def load(
    store: CheckpointStore,
    step: int,
    out: Mapping[str, Array | Window] | None = None,
    *,
    index: FlatIndex | None = None,
    partial: bool = False,
) -> Loaded:
    """Read the checkpoint of a step.

    Parameters
    ----------
    store
        Location of the checkpoints.
    step
        The step.
    out
        Arrays [count] or windows to read into, by buffer name; all buffers are allocated if None. Other buffers are
        verified and discarded.
    index
        To resume training: the checkpoint must have exactly the buffers of `out`, with the same tensors at the same
        offsets.
    partial
        Allow further buffers with `index`.

    Raises
    ------
    Damaged
        If a file is damaged; `out` may then be partly filled.
    UserError
        If the checkpoint does not match `out` or `index`.
    """
    target, lock = None if out is None else _windows(out), threading.Lock()
    manifest = _matching(store, step, target, index, partial=partial)
    windows = _windows(_allocate(manifest)) if target is None else target

    def views(rank: int, _: FileRecord) -> Iterator[memoryview]:
        return _views(manifest, rank, windows, lock)

    for fault in check_contents(store, manifest, views):
        raise fault
    on_host = {name: window.part for name, window in windows.items()}
    return Loaded(manifest, {name: part.array for name, part in on_host.items() if isinstance(part, HostBuffer)})


def _matching(
    store: CheckpointStore, step: int, out: Mapping[str, Window] | None, index: FlatIndex | None, *, partial: bool
) -> Manifest:
    """The manifest of a checkpoint whose files have the right sizes. Raises as `load` does."""
    manifest = read_manifest(store, step)
    for fault in check_sizes(store, manifest):
        raise fault
    difference = None if out is None else _difference(manifest, out, index, partial)
    if difference is not None:
        raise UserError(
            difference,
            where=str(store.place(step)),
            fix="resume with the model and the optimizer it was saved with, or start a new run",
        )
    return manifest


def load_newest(
    store: CheckpointStore,
    out: Mapping[str, Array | Window] | None = None,
    on_reject: OnReject | None = None,
    *,
    index: FlatIndex | None = None,
    partial: bool = False,
) -> Loaded | None:
    """Read the newest complete checkpoint as `load` does, and report each one that is skipped; None if there is none.

    If checkpoints were rejected and none was loaded, `out` may be partly filled.
    """
    for step in reversed(store.steps()):
        loaded = _load_or_reject(store, step, out, on_reject, index, partial)
        if loaded is not None:
            return loaded
    return None


def newest_matching(
    store: CheckpointStore, out: Mapping[str, Window], on_reject: OnReject, *, index: FlatIndex
) -> Manifest | None:
    """The newest complete checkpoint that `load` can read into `out`, which stays as it is; None if there is none.

    Reads and hashes it, and reports each one that is skipped. Raises UserError if it does not match.
    """
    for step in reversed(store.steps()):
        try:
            manifest = _matching(store, step, out, index, partial=False)
            for fault in check_contents(store, manifest, discarded):
                raise fault
        except Damaged as fault:
            on_reject(fault)
        else:
            return manifest
    return None


def _load_or_reject(
    store: CheckpointStore,
    step: int,
    out: Mapping[str, Array | Window] | None,
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


def _views(
    manifest: Manifest, rank: int, windows: Mapping[str, Window], lock: AbstractContextManager[Any]
) -> Iterator[memoryview]:
    """Memory for a rank's file; what is filled is written to a device when the next piece is asked for."""
    layout = file_layout(manifest.buffers, rank, manifest.world_size)
    yield memoryview(bytearray(len(layout.header)))
    scratch: memoryview | None = None
    for span in layout.spans:
        size = ITEM_SIZES[manifest.buffers[span.buffer].dtype]
        window = windows.get(span.buffer)
        for first, last, is_read in _cuts(span, window):
            for start in range(first, last, CHUNK // size):
                stop = min(start + CHUNK // size, last)
                part = window.part.slice(start - window.start, stop - window.start) if is_read and window else None
                if isinstance(part, HostBuffer):
                    yield part.array.data.cast("B")
                    continue
                scratch = scratch or memoryview(bytearray(CHUNK))
                piece = scratch[: (stop - start) * size]
                yield piece
                if part is not None:
                    with lock:
                        part.write(np.frombuffer(piece, part.dtype))


def _cuts(span: Span, window: Window | None) -> Iterator[tuple[int, int, bool]]:
    """Elements [first, last) of a span, cut so that each piece is inside a window or outside all; none is empty."""
    edges = [] if window is None else [window.start, window.start + window.part.count]
    inner = [min(max(edge, span.start), span.stop) for edge in edges]
    places = [span.start, *inner, span.stop]
    for place, (first, last) in enumerate(pairwise(places)):
        if first < last:
            yield first, last, place == 1


def _windows(out: Mapping[str, Array | Window]) -> dict[str, Window]:
    return {name: to if isinstance(to, Window) else Window.over(to) for name, to in out.items()}


def _allocate(manifest: Manifest) -> dict[str, Array]:
    return {name: np.empty(spec.count, DTYPES[spec.dtype]) for name, spec in manifest.buffers.items()}


def _difference(manifest: Manifest, out: Mapping[str, Window], index: FlatIndex | None, partial: bool) -> str | None:
    """Why the checkpoint does not match `out`; None if it does."""
    for name, window in out.items():
        spec = manifest.buffers.get(name)
        if spec is None:
            return f"the checkpoint has no {name}, only {', '.join(manifest.buffers)}"
        dtype = window.part.dtype
        if np.dtype(DTYPES[spec.dtype]) != dtype or spec.count != window.count:
            return (
                f"{name} is {spec.count} elements of {np.dtype(DTYPES[spec.dtype])} in the checkpoint "
                f"and {window.count} of {dtype} here"
            )
    if index is None:
        return None
    unread = [name for name in manifest.buffers if name not in out]
    if unread and not partial:
        return f"the checkpoint also has {', '.join(unread)}"
    for saved, described in zip_longest(manifest.index, index):
        if saved != described:
            name = (described or saved).name
            return f"tensor {name} has another shape, group or offset than in the checkpoint"
    return None
