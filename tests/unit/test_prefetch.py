"""Batches that are copied to a GPU while it computes, on a fake GPU whose streams run at random times."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_cuda import FakeCuda, fake_device
from graph_build_models import built, run_file
from messages import says
from queued import Fake, network, state_of, steps_of
from shuffled_cuda import ShuffledCuda
from waits import wait_until

from ortflow.workflow.data.batches import StepBatch
from ortflow.workflow.data.epoch_positions import Position
from ortflow.workflow.device import cuda, prefetch
from ortflow.workflow.device.prefetch import Prefetch
from ortflow.workflow.planning import holdings
from ortflow.workflow.planning.holdings import batches_of
from ortflow.workflow.steps.shard import prefetched
from ortflow.workflow.trainer import MicroBatch
from ortflow.workflow.trainer.step import GraphTrainer

COUNT = 1000
SOME = [np.arange(COUNT, dtype=np.float32) + 1000 * number for number in range(6)]


@pytest.fixture(autouse=True)
def everything_is_worthwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (prefetch, cuda):
        monkeypatch.setattr(module, "WORTHWHILE", 1)


def as_steps(steps: Iterable[list[MicroBatch]]) -> Iterator[StepBatch]:
    for batches in steps:
        yield StepBatch(batches, 0, sum(batch.count for batch in batches), Position(0, 0), epoch_end=False)


def curve(trainer: GraphTrainer, steps: Iterable[Sequence[MicroBatch]]) -> list[tuple[float, float, str | None]]:
    found, updates = [], 0
    for batches in steps:
        seeds = [1] * len(batches)
        outcome = trainer.step(batches, learning_rate=1e-3, update=updates + 1, seeds=seeds, control_values=[])
        updates += outcome.skipped is None
        found.append((outcome.loss, outcome.grad_norm, outcome.skipped))
    return found


@pytest.mark.parametrize("captures", [True, False])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_the_curve_is_the_same_whenever_the_streams_run(
    tmp_path: Path, accumulation: int, seed: int, *, captures: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = network(tmp_path / "model.onnx")
    graphs = built(model)
    changes: dict[str, Any] = {"train__gradient_accumulation": accumulation, "resources__cuda_graph": captures}
    spec = run_file(model, resources__kernels="onnxruntime", **changes)
    steps = steps_of([[8] * accumulation] * 12, damaged=(3,))
    plain = Fake(monkeypatch).trainer(graphs, spec)
    expected, state = curve(plain, steps), state_of(plain)
    monkeypatch.undo()
    for module in (prefetch, cuda):
        monkeypatch.setattr(module, "WORTHWHILE", 1)
    in_background: list[bool] = []
    send = Prefetch.send

    def watched(self: Prefetch, array: Any) -> Any:
        in_background.append(threading.current_thread() is not threading.main_thread())
        return send(self, array)

    monkeypatch.setattr(Prefetch, "send", watched)
    trainer = Fake(monkeypatch, ShuffledCuda(seed)).trainer(graphs, spec)
    with prefetched(as_steps(steps), trainer.prefetch, worthwhile=0) as ahead:
        # By their texts: a NaN equals no other.
        assert str(curve(trainer, (step.micro_batches for step in ahead))) == str(expected)
    for name, flat in state_of(trainer).items():
        np.testing.assert_array_equal(flat, state[name], err_msg=name)
    assert len(in_background) == 2 * 12 * accumulation, "each array is sent once"
    assert sum(in_background) >= 2 * 10, "the first micro-batch of every step but the first is sent ahead"


@pytest.mark.parametrize("seed", range(20))
def test_arrays_that_nobody_takes_are_overwritten(seed: int) -> None:
    device = fake_device(ShuffledCuda(seed))
    buffer = device.lend(SOME[0], prefetched=True)
    for array in SOME[1:4]:
        device.prefetch(array, buffer)
    for array in (SOME[3], SOME[1], SOME[4], SOME[5], SOME[2]):
        assert device.lend(array, buffer, prefetched=True).pointer == buffer.pointer
        np.testing.assert_array_equal(buffer.read(), array)
        device.prefetch(SOME[5], buffer)


@pytest.mark.parametrize("seed", range(20))
def test_the_host_need_not_wait_between_batches(seed: int) -> None:
    device = fake_device(ShuffledCuda(seed))
    taken = [device.allocate(COUNT, np.float32) for _ in SOME]
    buffer = None
    for array, copy in zip(SOME, taken, strict=True):
        buffer = device.lend(array, buffer, prefetched=True)
        copy.copy_from(buffer)
    for array, copy in zip(SOME, taken, strict=True):
        np.testing.assert_array_equal(copy.read(), array)


def test_an_array_is_sent_ahead_while_the_last_one_is_used() -> None:
    library = FakeCuda()
    device = fake_device(library)
    buffer = device.lend(SOME[0], prefetched=True)
    copies = device.copy_stream()
    for before, array in itertools.pairwise(SOME):
        writes = buffer.writes
        library.calls.clear()
        device.prefetch(array, buffer)
        assert {library.events[event] for name, event in library.calls if name == "cudaEventRecord"} == {copies}
        np.testing.assert_array_equal(buffer.read(), before)
        device.lend(array, buffer, prefetched=True)
        np.testing.assert_array_equal(buffer.read(), array)
        assert buffer.writes == writes + 1
    assert len(library.pinned) == 2


def test_what_is_not_prefetched_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    device = fake_device(ShuffledCuda(0))
    buffer = device.lend(SOME[0], prefetched=True)
    longer, strided = np.concatenate(SOME), np.stack(SOME[:2], axis=1)[:, 1]
    for array in (longer, strided, SOME[1]):
        device.prefetch(array, buffer)
        given = device.lend(array, buffer, prefetched=True)
        np.testing.assert_array_equal(given.read(), array)
    for module in (prefetch, cuda):
        monkeypatch.setattr(module, "WORTHWHILE", SOME[0].nbytes + 1)
    small = device.lend(SOME[2], prefetched=True)
    device.prefetch(SOME[3], small)
    np.testing.assert_array_equal(device.lend(SOME[3], small, prefetched=True).read(), SOME[3])


def test_without_pinned_memory_batches_are_copied_all_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    device = fake_device(FakeCuda(failing={"cudaHostAlloc": 2}))
    buffer = device.lend(SOME[0], prefetched=True)
    for array in SOME[1:3]:
        device.prefetch(array, buffer)
        np.testing.assert_array_equal(device.lend(array, buffer, prefetched=True).read(), array)
    assert says(capsys.readouterr().out, "batches … pageable memory: out of memory (CUDA error 2)")


def test_a_failed_copy_is_an_error_of_the_step() -> None:
    library = FakeCuda()
    device = fake_device(library)
    buffer = device.lend(SOME[0], prefetched=True)
    library.failing["cudaMemcpyAsync"] = 719
    with pytest.raises(Exception, match="error 719"):
        device.prefetch(SOME[1], buffer)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_plan_counts_the_memory_of_batches(
    tmp_path: Path, accumulation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holdings, "WORTHWHILE", 1)
    model = network(tmp_path / "model.onnx")
    fake = Fake(monkeypatch)
    spec = run_file(model, train__gradient_accumulation=accumulation, resources__kernels="onnxruntime")
    trainer = fake.trainer(built(model), spec)
    before = fake.device.held
    rows = 4096
    curve(trainer, steps_of([[rows] * accumulation]))
    on_gpus = spec.model_copy(update={"resources": spec.resources.model_copy(update={"gpus_per_rank": 1})})
    inputs = rows * (5 * 4 + 8)
    assert batches_of(on_gpus, inputs) == fake.device.held - before
    assert batches_of(spec, inputs) == inputs, "on CPUs the batch is used where it is"


def test_one_step_is_prefetched_while_another_is_computed() -> None:
    steps = steps_of([[2]] * 9)
    asked: list[Sequence[MicroBatch]] = []
    with prefetched(as_steps(steps), asked.append, worthwhile=0) as ahead:
        for number, step in enumerate(ahead):
            assert step.micro_batches is steps[number]
            wanted = min(number + 2, len(steps))
            wait_until(lambda wanted=wanted: len(asked) >= wanted)
            time.sleep(0.02)  # in which a thread that reads further ahead would show
            assert len(asked) == wanted
    assert [id(each) for each in asked] == [id(each) for each in steps]
