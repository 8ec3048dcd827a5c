"""Buffers and errors of the CUDA device, on a fake GPU in host memory."""

from __future__ import annotations

import gc
import mmap
import threading

import numpy as np
import pytest
from fake_cuda import GIB, FakeBlas, FakeCuda, fake_device
from messages import mentions, says

from ortflow.workflow.comm.solo import SoloCommunicator
from ortflow.workflow.comm.staged import StagedCommunicator
from ortflow.workflow.device import cuda
from ortflow.workflow.device.blas import Blas
from ortflow.workflow.device.cpu import HostBuffer
from ortflow.workflow.errors import OrtflowError, UserError
from ortflow.workflow.memory import KEPT

VALUES = np.arange(100, dtype=np.float32)


def test_buffers_are_views_of_one_allocation_that_lives_as_long_as_any() -> None:
    library = FakeCuda()
    device = fake_device(library)
    whole = device.allocate(100, np.float32)
    assert not whole.read().any()
    whole.write(VALUES)
    part = whole.slice(10, 20)
    assert part.pointer == whole.pointer + 40
    np.testing.assert_array_equal(part.read(), VALUES[10:20])
    part.slice(2, 4).fill(7)
    del whole
    gc.collect()
    assert len(library.blocks) == 1
    np.testing.assert_array_equal(part.read(), [10, 11, 7, 7, 14, 15, 16, 17, 18, 19])
    del part
    gc.collect()
    assert not library.blocks


def test_copies_fit_or_are_refused() -> None:
    device = fake_device()
    one, other = device.allocate(100, np.float32), device.allocate(100, np.float32)
    one.write(VALUES.reshape(10, 10))
    other.copy_from(one)
    out = np.empty((10, 10), np.float32)
    np.testing.assert_array_equal(other.read(out), VALUES.reshape(10, 10))
    short, wide = device.allocate(99, np.float32), device.allocate(100, np.float64)
    for wrong in (short, wide):
        with pytest.raises(ValueError, match="elements of"):
            other.copy_from(wrong)
        with pytest.raises(ValueError, match="elements of"):
            other.add(wrong)
    with pytest.raises(ValueError, match="99 values for 100"):
        one.write(VALUES[:99])
    with pytest.raises(ValueError, match="do not go into"):
        one.read(np.empty(100, np.float64))
    with pytest.raises(ValueError, match="do not go into"):
        one.read(np.empty((100, 2), np.float32)[:, 0])


def test_sums_are_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "blas", lambda stream: Blas(FakeBlas(), stream))
    device = fake_device()
    one, other = device.allocate(100, np.float32), device.allocate(100, np.float32)
    one.write(VALUES)
    other.fill(2)
    one.slice(0, 50).add(other.slice(50, 100))
    np.testing.assert_array_equal(one.read(), np.where(VALUES < 50, VALUES + 2, VALUES))


def test_a_batch_takes_the_memory_of_the_one_before() -> None:
    library = FakeCuda()
    device = fake_device(library)
    first = device.lend(VALUES.reshape(2, 50))
    second = device.lend(VALUES[:40] + 1, first)
    assert (second.pointer, second.count) == (first.pointer, 40)
    np.testing.assert_array_equal(second.read(), VALUES[:40] + 1)
    back = device.lend(VALUES + 2, second)
    assert back.pointer == first.pointer, "a smaller batch in between does not free the memory"
    np.testing.assert_array_equal(back.read(), VALUES + 2)
    third = device.lend(np.arange(5), first)
    assert third.pointer != first.pointer, "another type"


def test_values_are_sent_by_two_pinned_blocks_in_turn() -> None:
    library = FakeCuda()
    buffer = fake_device(library).allocate(100, np.float32)
    for number in range(5):
        buffer.send(VALUES + number)
        np.testing.assert_array_equal(buffer.read(), VALUES + number)
    held = [block.view(np.float32)[0] for block in library.pinned.values()]
    assert sorted(held) == [3, 4]
    # Each block waits for the event after its own last copy before it is filled again.
    marks = [call for call in library.calls if call[0].startswith("cudaEvent")]
    first, second = sorted(library.events)
    expected = [(name, event) for event in (first, second) for name in ("cudaEventSynchronize", "cudaEventRecord")]
    assert marks == [*expected, *expected, *expected[:2]]
    del buffer
    gc.collect()
    assert not library.pinned


def test_values_are_sent_without_pinned_memory(capsys: pytest.CaptureFixture[str]) -> None:
    library = FakeCuda(failing={"cudaHostAlloc": 2})
    device = fake_device(library)
    for number in range(2):
        buffer = device.lend(VALUES + number)
        np.testing.assert_array_equal(buffer.read(), VALUES + number)
    assert says(capsys.readouterr().out, "batches … pageable memory: out of memory (CUDA error 2)")


def test_another_thread_reads_on_a_stream_of_its_own_behind_what_is_settled() -> None:
    library = FakeCuda()
    device = fake_device(library)
    buffer = device.allocate(4, np.float32)

    def read() -> list[tuple[str, int]]:
        library.calls.clear()
        reader = threading.Thread(target=buffer.read)
        reader.start()
        reader.join()
        return list(library.calls)

    before = read()
    (mark,) = library.events
    assert before == [("cudaEventRecord", mark), ("cudaStreamWaitEvent", mark), ("cudaStreamSynchronize", 78)]
    device.settle()
    (settled,) = {*library.events} - {mark}
    assert library.events[settled] == 77
    assert read() == [("cudaStreamWaitEvent", settled), ("cudaStreamSynchronize", 78)]
    assert library.streams == [77, 78], "one stream for all threads"


def test_another_thread_takes_the_device_before_it_reads() -> None:
    library = FakeCuda()
    device = fake_device(library)
    buffer = device.allocate(4, np.float32)
    before = len(library.used)
    buffer.read()
    assert len(library.used) == before
    reader = threading.Thread(target=buffer.read)
    reader.start()
    reader.join()
    assert library.used[before:] == [0]


def test_memory_that_runs_out_names_the_setting_or_who_has_it() -> None:
    with pytest.raises(UserError, match=r"data\.micro_batch.*80\.0 GiB") as caught:
        fake_device().allocate(1 << 40, np.float32)
    assert "lower it" in str(caught.value)
    full = fake_device()
    full.account = lambda: {"parameters": 10 * GIB, "gradients": 10 * GIB, "moments": 20 * GIB, "checkpoint": 70 * GIB}
    reported = str(full.failure("out of memory"))
    assert says(reported, "data.micro_batch: … NVIDIA Fake, 80.0 GiB … activations, 40.0")
    full.account = lambda: {"parameters": 20 * GIB, "gradients": 20 * GIB, "moments": 39 * GIB}
    assert "train.offload: the memory of NVIDIA Fake" in str(full.failure("out of memory"))
    shared = fake_device(FakeCuda(claimed=30 * GIB))
    for message in ("Failed to allocate memory for requested buffer of size 8", "CUDA failure 2: out of memory"):
        error = shared.failure(message)
        assert type(error) is OrtflowError, "another try may find it free"
        assert mentions(str(error), "30.0", "80.0 GiB")
    assert str(shared.failure("illegal address")) == "NVIDIA Fake failed: illegal address"


def test_a_gpu_that_fails_in_a_copy_is_an_error_to_try_again() -> None:
    library = FakeCuda()
    buffer = fake_device(library).allocate(4, np.float32)
    library.failing["cudaMemcpyAsync"] = 719
    with pytest.raises(OrtflowError, match="NVIDIA Fake failed: error 719") as caught:
        buffer.read()
    assert caught.value.exit_code == 1


class Doubling(SoloCommunicator):
    """Two ranks with the same values."""

    def all_reduce(self, buffer: HostBuffer) -> None:  # type: ignore[override]
        buffer.add(buffer)


def test_collectives_go_by_way_of_the_host() -> None:
    device = fake_device()
    staged = StagedCommunicator(Doubling())
    buffer = device.allocate(100, np.float64)
    buffer.write(VALUES.astype(np.float64))
    staged.all_reduce(buffer.slice(0, 10))
    np.testing.assert_array_equal(buffer.read(), np.where(VALUES < 10, VALUES * 2, VALUES))
    assert (staged.rank, staged.world_size, staged.gather(3), staged.broadcast_object(4)) == (0, 1, [3], 4)


def test_the_peak_is_kept_when_memory_moves() -> None:
    device = fake_device()
    assert device.peak() == 0
    held = device.allocate(1000, np.float32)
    assert device.peak() == 4000
    device.memory_moves()
    more = device.allocate(1000, np.float32)
    device.memory_moves()
    del more
    gc.collect()
    assert device.peak() == 8000
    assert device.held == 4 * held.count


def test_a_state_on_a_gpu_is_copied_as_a_whole_to_page_locked_memory() -> None:
    library = FakeCuda()
    copying = fake_device(library).copying(room=KEPT + 5)
    assert (copying.kept, copying.duty) == (KEPT + 5, 1.0)
    memory = mmap.mmap(-1, 8192)
    assert copying.lock is not None
    locked = copying.lock(memory)
    assert list(library.locked.values()) == [8192]
    del locked
    gc.collect()
    assert not library.locked
    # Where the host has little room, as much as of a state in its own memory; where memory cannot be locked, it is not.
    copying = fake_device(FakeCuda(failing={"cudaHostRegister": 2})).copying(room=0)
    assert copying.kept == KEPT
    assert copying.lock is not None
    assert copying.lock(memory) is None
