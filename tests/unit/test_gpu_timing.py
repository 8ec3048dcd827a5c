"""Times of work on a GPU, by a clock that moves when the fake works."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from fake_cuda import FakeCuda, fake_device

from ortflow.workflow.device import timing
from ortflow.workflow.device.cuda import CudaDevice
from ortflow.workflow.device.timing import seconds_of

WORK, QUEUEING = 3.0, 100.0


class Machine:
    """A GPU that takes WORK for a run, and a host that takes QUEUEING to queue one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **failing: int) -> None:
        self.library = FakeCuda(failing=failing)
        self.device: CudaDevice = fake_device(self.library)
        self.clock, self.queued = 0.0, 0
        self.fault: Exception | None = None
        monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: self.clock))

    def queue(self) -> None:
        self.queued += 1
        self.clock += QUEUEING
        if self.fault is not None and self.library.recording is not None:
            raise self.fault
        self.library.kernel(self._work)

    def _work(self) -> None:
        self.clock += WORK

    def seconds(self) -> float:
        return seconds_of(self.device.here(), self.device.stream, self.queue, 5)


def test_the_time_is_that_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    assert machine.seconds() == WORK
    assert machine.queued == 5
    assert [name for name, _ in machine.library.calls].count("cudaGraphLaunch") == 2
    assert not machine.library.graphs, "the graph is given back"


@pytest.mark.parametrize("failing", ["cudaStreamBeginCapture", "cudaStreamEndCapture", "cudaGraphInstantiate"])
def test_what_cannot_be_captured_is_timed_as_it_is_queued(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, **{failing: 900})
    assert machine.seconds() == WORK + QUEUEING


def test_a_library_that_refuses_to_be_captured_is_timed_as_it_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    machine.fault = ValueError("not while capturing")
    assert machine.seconds() == WORK + QUEUEING
    assert machine.library.recording is None, "the capture has ended"
    assert not machine.library.graphs


def test_what_fails_uncaptured_too_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)

    def fail() -> Any:
        raise ValueError("never")

    machine.queue = fail  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="never"):
        machine.seconds()
