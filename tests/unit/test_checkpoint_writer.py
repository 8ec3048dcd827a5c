from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from checkpoints import INDEX, progress_of, same, save, state
from waits import PATIENCE, wait_until

from ortflow.workflow.checkpoint import image, writer
from ortflow.workflow.checkpoint.commit import commit
from ortflow.workflow.checkpoint.load import load
from ortflow.workflow.checkpoint.store import DirectoryStore
from ortflow.workflow.checkpoint.tensors import file_layout
from ortflow.workflow.checkpoint.verify import verify
from ortflow.workflow.checkpoint.writer import Status, Writer, specs
from ortflow.workflow.device.copying import Copying
from ortflow.workflow.device.cpu import HostBuffer


class SlowBuffer(HostBuffer):
    """A buffer whose copy to the host waits until it is released."""

    gate = threading.Event()

    def slice(self, start: int, stop: int) -> SlowBuffer:
        return SlowBuffer(self.array[start:stop])

    def read(self, out: npt.NDArray[np.float32] | None = None) -> npt.NDArray[np.float32]:
        assert self.gate.wait(PATIENCE)
        return super().read(out)


class FailingBuffer(SlowBuffer):
    """A buffer on a device that was lost."""

    def slice(self, start: int, stop: int) -> FailingBuffer:
        return FailingBuffer(self.array[start:stop])

    def read(self, out: npt.NDArray[np.float32] | None = None) -> npt.NDArray[np.float32]:
        raise RuntimeError("device lost")


def finish(store: DirectoryStore, step: int, status: Status, buffers: dict[str, HostBuffer]) -> None:
    assert status.record is not None, status
    commit(
        store, step, 0, [status.record], buffers=specs(buffers), index=INDEX, progress=progress_of(step), environment={}
    )


def test_what_is_saved_is_the_state_at_the_start(tmp_path: Path) -> None:
    store, buffers, before = DirectoryStore(tmp_path), state(1, 100_000), state(1, 100_000)
    writer = Writer(store, buffers, rank=0, world_size=1, attempt=0)
    assert writer.poll().state == "idle"
    for step in (1, 2):
        writer.start(step)
        writer.wait_copied()
        for buffer in buffers.values():
            buffer.fill(step)
        status = writer.wait()
        assert status.state == "written"
        assert status.seconds > 0
        finish(store, step, status, buffers)
    assert same(load(store, 1).buffers, before)
    for name, array in load(store, 2).buffers.items():
        assert (array == 1).all(), name


def at_wait(writer: Writer, monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Act when a caller has begun to wait for the copy, and its duration counts."""
    released = writer._image.released
    wait = released.wait

    def waits() -> bool:
        act()
        return wait()

    monkeypatch.setattr(released, "wait", waits)


def test_the_caller_waits_for_the_copy_and_gets_its_duration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = {"parameters": SlowBuffer(np.ones(100, np.float32))}
    writer = Writer(DirectoryStore(tmp_path), buffers, rank=0, world_size=1, attempt=0)
    writer.wait_copied()
    assert writer.stall_seconds == 0
    SlowBuffer.gate.clear()
    writer.start(1)
    at_wait(writer, monkeypatch, threading.Timer(0.2, SlowBuffer.gate.set).start)
    writer.wait_copied()
    assert SlowBuffer.gate.is_set()
    assert writer.stall_seconds > 0.1
    assert writer.wait().state == "written"


def test_one_save_at_a_time(tmp_path: Path) -> None:
    buffers = {"parameters": SlowBuffer(np.ones(100, np.float32))}
    writer = Writer(DirectoryStore(tmp_path), buffers, rank=0, world_size=1, attempt=0)
    SlowBuffer.gate.clear()
    writer.start(1)
    assert writer.poll().state == "writing"
    with pytest.raises(RuntimeError, match="still in progress"):
        writer.start(2)
    SlowBuffer.gate.set()
    assert writer.wait().state == "written"
    writer.start(2)
    assert writer.wait().state == "written"


def test_it_pauses_beside_the_training_and_hurries_when_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image, "CHUNK", 4096)
    writer = Writer(
        DirectoryStore(tmp_path), state(1, 100_000), rank=0, world_size=1, attempt=0, copying=Copying(duty=1e-9)
    )
    writer.start(1)
    writer.wait_copied()
    path = tmp_path / ".tmp-step-00000001-00" / "rank-0000.safetensors"
    wait_until(lambda: path.exists() and path.stat().st_size)
    threading.Event().wait(0.2)
    assert writer.poll().state == "writing"
    assert path.stat().st_size < writer.size
    waiting = threading.Thread(target=writer.wait, daemon=True)
    waiting.start()
    waiting.join(PATIENCE)
    assert writer.poll().state == "written"
    assert path.stat().st_size == writer.size
    writer.start(2, urgent=True)
    assert writer.wait().seconds < PATIENCE


class SteadyClock:
    """Each call of a clock finds it this much later: a tenth of a second of the core's time takes 0.15 seconds."""

    def __init__(self) -> None:
        self._used = self._wall = 0.0

    def thread_time(self) -> float:
        self._used += 0.1
        return self._used

    def perf_counter(self) -> float:
        self._wall += 0.15
        return self._wall


class Pauses(threading.Event):
    """Records how long somebody waits for it, and does not let them."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.seconds.append(-1.0 if timeout is None else timeout)
        return False


@pytest.mark.parametrize(("duty", "pause"), [(0.25, 0.1 / 0.25 - 0.15), (1.0, 0.0)])
def test_pauses_limit_the_use_of_a_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, duty: float, pause: float
) -> None:
    monkeypatch.setattr(image, "CHUNK", 4096)
    monkeypatch.setattr(writer, "time", SteadyClock())
    buffers = state(1, 5000)
    layout = file_layout(specs(buffers), 0, 1)
    live, hurry = image.Image(layout, buffers, Copying()), Pauses()
    live.copy()
    writer.write_file(tmp_path / "file", live, layout.size, hurry, duty)
    assert len(hurry.seconds) == -(-layout.size // 4096)
    assert hurry.seconds == pytest.approx([pause] * len(hurry.seconds))


@pytest.mark.parametrize("direct", [True, False])
def test_the_umask_alone_limits_who_reads_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, direct: bool
) -> None:
    opened = os.open

    def open_file(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT and not direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, flags, mode)

    monkeypatch.setattr(os, "open", open_file)
    before = os.umask(0)
    try:
        os.close(writer._open(tmp_path / "file"))
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o666


def test_a_device_that_fails_ends_the_save_and_lets_the_caller_go(tmp_path: Path) -> None:
    buffers = {"parameters": FailingBuffer(np.ones(100, np.float32))}
    writer = Writer(DirectoryStore(tmp_path), buffers, rank=3, world_size=4, attempt=0)
    writer.start(1)
    writer.wait_copied()
    status = writer.wait()
    assert status.state == "written"  # rank 3 of 4 has no share of 100 elements
    writer = Writer(DirectoryStore(tmp_path), buffers, rank=0, world_size=4, attempt=0)
    writer.start(1)
    writer.wait_copied()
    status = writer.wait()
    assert status.state == "failed"
    assert "device lost" in status.reason


def test_an_unwritable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    writer = Writer(DirectoryStore(tmp_path / "file"), state(1), rank=0, world_size=1, attempt=0)
    writer.start(1)
    status = writer.wait()
    assert status.state == "failed"
    assert "Not a directory" in status.reason


@pytest.mark.parametrize("refusal", ["open", "write"])
def test_a_file_system_without_direct_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: str) -> None:
    opened, written = os.open, os.write
    refused = []

    def refuse_open(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT and refusal == "open":
            refused.append(path)
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, flags, mode)

    def refuse_write(descriptor: int, data: bytes) -> int:
        import fcntl

        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT and refusal == "write":
            refused.append(descriptor)
            raise OSError(errno.EINVAL, "Invalid argument")
        return written(descriptor, data)

    monkeypatch.setattr(os, "open", refuse_open)
    monkeypatch.setattr(os, "write", refuse_write)
    store, buffers = DirectoryStore(tmp_path), state(1, 5000)
    save(store, 1, buffers, 2)
    assert len(refused) == 2
    assert verify(store, 1) == []
    assert same(load(store, 1).buffers, buffers)


def test_writes_cut_short_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: written(descriptor, data[: max(1, len(data) // 3)]))
    store, buffers = DirectoryStore(tmp_path), state(1, 5000)
    save(store, 1, buffers, 1)
    assert same(load(store, 1).buffers, buffers)


def test_a_large_state_is_written_from_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may change once all but its end is on the disk; the end was copied."""
    monkeypatch.setattr(image, "CHUNK", 4096)
    store, buffers, before = DirectoryStore(tmp_path), state(1, 20_000), state(1, 20_000)
    writer = Writer(store, buffers, rank=0, world_size=1, attempt=0, copying=Copying(kept=3 * 4096))
    written, pieces, gate = os.write, [], threading.Event()

    def slow_write(descriptor: int, data: memoryview) -> int:
        pieces.append(len(data))
        assert len(pieces) < 20 or gate.wait(PATIENCE)
        return written(descriptor, data)

    monkeypatch.setattr(os, "write", slow_write)
    writer.start(1)
    waits = threading.Event()
    at_wait(writer, monkeypatch, waits.set)
    waiting = threading.Thread(target=writer.wait_copied, daemon=True)
    waiting.start()
    assert waits.wait(PATIENCE)
    waiting.join(0.3)
    assert waiting.is_alive()
    gate.set()
    waiting.join(PATIENCE)
    assert not waiting.is_alive()
    for buffer in buffers.values():
        buffer.fill(7)
    finish(store, 1, writer.wait(), buffers)
    assert writer.stall_seconds > 0.2
    assert same(load(store, 1).buffers, before)
    assert verify(store, 1) == []


def test_the_memory_of_a_large_state_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    monkeypatch.setattr(image, "CHUNK", 4096)
    make = image.touch
    monkeypatch.setattr(image, "touch", lambda memory: taken.append(len(memory)) or make(memory))
    copying = Copying(kept=1 << 16)
    writer = Writer(DirectoryStore(tmp_path), state(1, 1 << 20), rank=0, world_size=1, attempt=0, copying=copying)
    writer.start(1)
    assert writer.wait().state == "written"
    assert writer.copied <= 1 << 16
    assert sum(taken) <= (1 << 16) + 2 * 4096


def test_a_large_state_is_copied_as_a_whole_where_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of a GPU: it may change while nothing of it is on the disk yet."""
    monkeypatch.setattr(image, "CHUNK", 4096)
    monkeypatch.setattr(image, "COPIED", 3 * 4096)
    locked, may_lock = list[int](), threading.Event()

    def lock(memory: mmap.mmap) -> object:
        assert may_lock.wait(PATIENCE)
        locked.append(len(memory))
        return object()

    store, buffers, before = DirectoryStore(tmp_path), state(1, 20_000), state(1, 20_000)
    copying = Copying(kept=1 << 30, duty=1.0, lock=lock)
    writer = Writer(store, buffers, rank=0, world_size=1, attempt=0, copying=copying)
    assert 0 <= writer.copied - writer.size < 4096
    assert not locked, "the run starts before its memory is ready"
    written, gate = os.write, threading.Event()

    def slow_write(descriptor: int, data: memoryview) -> int:
        assert gate.wait(PATIENCE)
        return written(descriptor, data)

    monkeypatch.setattr(os, "write", slow_write)
    for step in (1, 2):
        gate.clear()
        writer.start(step)
        if step == 1:
            waiting = threading.Thread(target=writer.wait_copied, daemon=True)
            waiting.start()
            waiting.join(0.2)
            assert waiting.is_alive()
            may_lock.set()
        writer.wait_copied()
        assert locked == [writer.copied]
        for name, buffer in buffers.items():
            buffer.write(7 * before[name].array if step == 1 else buffer.array)
        assert writer.poll().state == "writing"
        gate.set()
        finish(store, step, writer.wait(), buffers)
        expected = {name: HostBuffer(buffer.array * (1 if step == 1 else 7)) for name, buffer in before.items()}
        assert same(load(store, step).buffers, expected)
        assert verify(store, step) == []


def test_memory_that_cannot_be_prepared_fails_the_save(tmp_path: Path) -> None:
    def lock(memory: mmap.mmap) -> object:
        raise MemoryError("no memory to lock")

    copying = Copying(kept=1 << 30, lock=lock)
    writer = Writer(DirectoryStore(tmp_path), state(1, 20_000), rank=0, world_size=1, attempt=0, copying=copying)
    writer.start(1)
    status = writer.wait()
    assert status.state == "failed"
    assert "no memory to lock" in status.reason
    assert not (tmp_path / "step-00000001" / "COMMITTED").exists()
