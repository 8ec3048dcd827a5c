"""The content of a rank's file: the same whatever is copied, and what of the state may change meanwhile."""

from __future__ import annotations

import mmap
import threading
from itertools import pairwise

import numpy as np
import pytest
from checkpoints import state
from waits import PATIENCE

from ortflow.workflow.checkpoint import image
from ortflow.workflow.checkpoint.image import Image
from ortflow.workflow.checkpoint.tensors import PAGE, FileLayout, file_layout
from ortflow.workflow.checkpoint.writer import specs
from ortflow.workflow.device.copying import Copying
from ortflow.workflow.device.cpu import HostBuffer

COUNT = 3001


def layout_of(buffers: dict[str, HostBuffer], rank: int = 0, world_size: int = 1) -> FileLayout:
    return file_layout(specs(buffers), rank, world_size)


def expected(layout: FileLayout, buffers: dict[str, HostBuffer]) -> bytes:
    """Header, spans and zeros up to the end of a page."""
    whole = bytearray(-(-layout.size // PAGE) * PAGE)
    whole[: len(layout.header)] = layout.header
    for span in layout.spans:
        whole[span.offset : span.end] = buffers[span.buffer].array[span.start : span.stop].tobytes()
    return bytes(whole)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kept", [PAGE, 2 * PAGE + 1, 1 << 20])
@pytest.mark.parametrize(("chunk", "copied"), [(PAGE, 3 * PAGE), (2 * PAGE, PAGE), (1 << 20, 1 << 20)])
def test_the_file_does_not_depend_on_its_pieces(
    monkeypatch: pytest.MonkeyPatch, rank: int, kept: int, chunk: int, copied: int
) -> None:
    monkeypatch.setattr(image, "CHUNK", chunk)
    monkeypatch.setattr(image, "COPIED", copied)
    buffers = state(1, COUNT)
    layout = layout_of(buffers, rank, 2)
    made = Image(layout, buffers, Copying(kept=kept))
    for _ in range(2):
        made.copy()
        pieces = [bytes(piece) for piece in made.pieces()]
        assert b"".join(pieces) == expected(layout, buffers)
        assert {len(piece) % PAGE for piece in pieces} == {0}
        assert max(map(len, pieces)) <= chunk
        for buffer in buffers.values():
            buffer.array[:] = buffer.array[::-1].copy()


@pytest.mark.parametrize("kept", [PAGE, 3 * PAGE + 1, 1 << 20])
def test_what_is_copied_may_change_and_the_rest_only_when_it_is_released(kept: int) -> None:
    buffers = state(1, COUNT)
    layout = layout_of(buffers)
    made = Image(layout, buffers, Copying(kept=kept))
    size = -(-layout.size // PAGE) * PAGE
    live = -(-max(0, layout.size - kept) // PAGE) * PAGE
    assert made.copied == size - live
    assert made.released.is_set()
    made.released.clear()
    before = expected(layout, buffers)
    made.copy()
    assert made.released.is_set() is (live == 0)
    for buffer in buffers.values():
        buffer.array[:] = 0
    found, released = b"", []
    for piece in made.pieces():
        found += bytes(piece)
        released.append((len(found) > live, made.released.is_set()))
    assert found[live:] == before[live:]
    assert found[:live] == expected(layout, buffers)[:live]
    assert made.released.is_set()
    assert all(late == free for late, free in released)
    assert all(first <= second for first, second in pairwise(free for _, free in released))


def test_a_copy_waits_until_its_memory_is_locked() -> None:
    buffers, gate, locked = state(1, COUNT), threading.Event(), list[mmap.mmap]()

    def lock(memory: mmap.mmap) -> object:
        assert gate.wait(PATIENCE)
        locked.append(memory)
        return memory

    layout = layout_of(buffers)
    made = Image(layout, buffers, Copying(lock=lock))
    threading.Timer(0.2, gate.set).start()
    made.copy()
    assert [len(memory) for memory in locked] == [made.copied]
    assert b"".join(map(bytes, made.pieces())) == expected(layout, buffers)


def test_a_lock_that_fails_is_reported_by_the_copy() -> None:
    def lock(memory: mmap.mmap) -> object:
        raise RuntimeError("no memory to lock")

    buffers = state(1, COUNT)
    made = Image(layout_of(buffers), buffers, Copying(lock=lock))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no memory to lock"):
            made.copy()


def test_an_empty_state_has_its_header() -> None:
    buffers = {"parameters": HostBuffer(np.zeros(0, np.float32))}
    layout = layout_of(buffers)
    made = Image(layout, buffers, Copying())
    made.copy()
    assert b"".join(map(bytes, made.pieces())) == expected(layout, buffers)
