"""Averages, frozen groups, Muon and Adafactor on a fake GPU: the CPU's bits, captured or not; skips; resumed steps."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graph_build_models import Array, built, run_file
from lazy_cuda import LazyCuda, LazyNccl
from onnx import TensorProto
from queued import Fake, FakeDevice, halved, network, state_of, steps_of
from safetensors.numpy import load_file
from test_queued_rounded import with_casts
from thread_wire import on_threads
from trainers import opened, trainer_on, write_update
from training_options import OPTIONS, RULES, Going, alike, same

from ortflow.workflow.comm import Communicator
from ortflow.workflow.comm.nccl import NcclCommunicator
from ortflow.workflow.fusion.rounded import writing_rounded
from ortflow.workflow.graph.types import GraphSet
from ortflow.workflow.sessions.session import Sessions
from ortflow.workflow.spec.run import TrainerRunSpec
from ortflow.workflow.trainer import Report, StepOutcome
from ortflow.workflow.trainer.opening import open_trainer
from ortflow.workflow.trainer.queued_work import QueuedWork
from ortflow.workflow.trainer.rounded import Rounded

CASES = [
    (rule, options) for rule in RULES for options in OPTIONS if rule in ("muon", "adafactor") or options != "plain"
]
DAMAGED = (2, 5, 9, 14)
STEPS = 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return network(tmp_path_factory.mktemp("options") / "model.onnx")


def graphs_in(folder: Path, model: Path, rule: str, options: str) -> tuple[GraphSet, TrainerRunSpec]:
    folder.mkdir(parents=True, exist_ok=True)
    copy = Path(shutil.copy(model, folder / "model.onnx"))
    changes = {"train__optimizer": RULES[rule], **OPTIONS[options], "train__clip_norm": 1.0}
    return built(copy, **changes), run_file(copy, **changes, resources__kernels="onnxruntime")


@pytest.mark.parametrize(("rule", "options"), CASES)
def test_the_bits_are_those_of_a_cpu_captured_or_not(
    model: Path, rule: str, options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs, spec = graphs_in(tmp_path, model, rule, options)
    steps = steps_of([[8]] * STEPS, damaged=DAMAGED)
    on_cpu = trainer_on(graphs, spec)
    expected = Going(on_cpu).go(steps)
    assert [number for number, outcome in enumerate(expected) if outcome.skipped] == list(DAMAGED)
    for captures, begins in ((True, False), (True, True), (False, True)):
        fake = Fake(monkeypatch)
        resources = spec.resources.model_copy(update={"cuda_graph": captures})
        trainer = fake.trainer(graphs, spec.model_copy(update={"resources": resources}), begins=begins)
        assert trainer.begins == begins
        alike(Going(trainer).go(steps, ahead=True), expected)
        same(state_of(trainer), state_of(on_cpu))
        assert ("the update is captured as a CUDA graph" in fake.log) == captures
        assert trainer.numbers() == on_cpu.numbers()
        monkeypatch.undo()


def test_frozen_groups_stay_bit_by_bit(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, spec = graphs_in(tmp_path, model, "adamw", "both")
    going = Going(Fake(monkeypatch).trainer(graphs, spec, begins=True))
    states = [state_of(going.trainer)]
    for batches in steps_of([[8]] * 9):
        going.go([batches])
        states.append(state_of(going.trainer))
    for name, thaws in (("w", 4), ("scale", 4), ("u", 6), ("b", 0)):
        entry = going.trainer.index[name]
        for buffer in ("parameters", "moment_1", "moment_2"):
            parts = [state[buffer][entry.offset : entry.end] for state in states]
            same_bits = [np.array_equal(*(part.view(np.uint32) for part in parts[at : at + 2])) for at in range(9)]
            assert same_bits == [at < thaws for at in range(9)], (name, buffer)
    assert going.trainer.numbers() == {"frozen_updates.0": 4.0, "frozen_updates.1": 6.0}
    # The first update of Adam has the length of the rate, whatever the gradient, if its number is 1.
    entry, rate = going.trainer.index["w"], 1e-2 / 5
    old, new = (states[at]["parameters"][entry.offset : entry.end] for at in (4, 5))
    assert np.median(np.abs(new - old * (1 - rate * RULES["adamw"]["weight_decay"]))) == pytest.approx(rate, rel=1e-3)


@pytest.mark.parametrize("rule", RULES)
def test_overflows_leave_moments_average_and_counters(
    model: Path, rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a run resumes from between them bit by bit."""
    graphs, spec = graphs_in(tmp_path, model, rule, "both")
    whole, steps, fake = halved(onnx.load(graphs.train)), steps_of([[8]] * STEPS), Fake(monkeypatch)
    going = Going(fake.trainer(graphs, spec, train=whole, begins=True))
    for batches in steps[:5]:
        before, numbers = state_of(going.trainer), dict(going.trainer.numbers())
        (outcome,) = going.go([batches])
        if outcome.overflow:
            assert {"parameters", "average"} <= before.keys()
            same(state_of(going.trainer), before)
            assert numbers.items() - {("loss_scale", numbers["loss_scale"])} <= dict(going.trainer.numbers()).items()
    assert going.updates == 2, "three of five steps overflow"
    assert going.trainer.numbers().items() >= {"frozen_updates.0": 1.0, "frozen_updates.1": 2.0}.items()
    resumed = Going(Fake(monkeypatch).trainer(graphs, spec, train=whole, begins=True))
    resumed.take_over(going)
    found, expected = resumed.go(steps[5:]), going.go(steps[5:], ahead=True)
    alike(found, expected)
    assert any(outcome.overflow for outcome in expected), "another one behind the checkpoint"
    assert going.updates > 8, "most steps count"
    same(state_of(resumed.trainer), state_of(going.trainer))
    assert resumed.trainer.numbers() == going.trainer.numbers()


def test_an_evaluation_reads_the_average_and_leaves_every_bit(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs, spec = graphs_in(tmp_path, model, "adafactor", "average")
    steps, results = steps_of([[8]] * 12), []
    monkeypatch.setattr("ortflow.workflow.trainer.averaged.PIECE", 50)
    for gpu in (False, True):
        trainer = Fake(monkeypatch).trainer(graphs, spec, begins=True) if gpu else trainer_on(graphs, spec)
        going = Going(trainer)
        going.go(steps[:8])
        before, losses = state_of(going.trainer), []
        losses.append(going.trainer.evaluate(steps[9], list).metrics["loss"])
        going.trainer.exchange_average()
        inside = state_of(going.trainer)["parameters"]
        np.testing.assert_array_equal(inside[: going.trainer.index.trained], before["average"])
        losses.append(going.trainer.evaluate(steps[9], list).metrics["loss"])
        going.trainer.exchange_average()
        same(state_of(going.trainer), before)
        assert losses[0] != losses[1]
        results.append((losses, going.go(steps[8:])))
    assert results[0][0] == results[1][0]
    alike(results[0][1], results[1][1])


@pytest.mark.parametrize("options", ["average", "both"])
def test_halves_of_parameters_are_those_that_training_has(
    model: Path, options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written by the updates of all groups, and rounded anew behind an exchange of the average."""
    found, rounds, refresh, whole_form = [], list[int](), Rounded.refresh, QueuedWork.whole_form_of

    def noting(self: Rounded) -> None:
        before = self.seen
        refresh(self)
        rounds.append(int(before != self.seen))

    def with_halves(self: QueuedWork, update: onnx.ModelProto, *, multiplied: bool) -> onnx.ModelProto:
        return writing_rounded(whole_form(self, update, multiplied=multiplied), TensorProto.FLOAT16)

    monkeypatch.setattr(Rounded, "refresh", noting)
    for kept in (False, True):
        graphs, spec = graphs_in(tmp_path / str(kept), model, "adamw", options)
        rounded, fake = with_casts(onnx.load(graphs.train)), Fake(monkeypatch)
        fake.device = FakeDevice(fake.device.here(), fake.device.gpu, precision="fp16")
        form = tmp_path / "form.onnx"
        form.write_bytes(rounded.SerializeToString())
        with monkeypatch.context() as patch:
            if kept:
                patch.setattr(Sessions, "form_of", lambda _, graph, only={graphs.train: form}: only.get(graph))
                patch.setattr(QueuedWork, "whole_form_of", with_halves)
                patch.setattr("queued.guarded", lambda update, **given: writing_rounded(plain(update, **given), 10))
            going = Going(fake.trainer(graphs, spec, train=None if kept else rounded, begins=True))
        rounds.clear()
        outcomes = going.go(steps_of([[8]] * 8, damaged=[3]))
        going.trainer.exchange_average()
        going.trainer.exchange_average()
        outcomes += going.go(steps_of([[8]] * 4))
        found.append((outcomes, state_of(going.trainer)))
        if kept:
            assert sum(rounds) == 2, "at first, and behind the exchange"
    alike(found[0][0], found[1][0])
    same(found[0][1], found[1][1])


def plain(update: onnx.ModelProto, **given: Any) -> onnx.ModelProto:
    from ortflow.workflow.optim.guard import guarded

    return guarded(update, **given)


def test_a_run_moves_between_devices_within_a_frozen_group(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs, spec = graphs_in(tmp_path, model, "muon", "both")
    steps = steps_of([[8]] * 16, damaged=(1, 7))
    whole = Going(trainer_on(graphs, spec))
    whole.go(steps)
    expected, before = state_of(whole.trainer), Going(trainer_on(graphs, spec))
    for first, last, gpu in ((0, 3, True), (3, 5, False), (5, 10, True), (10, 16, False)):
        going = Going(Fake(monkeypatch).trainer(graphs, spec, begins=True) if gpu else trainer_on(graphs, spec))
        going.take_over(before)
        going.go(steps[first:last])
        monkeypatch.undo()
        before = going
    same(state_of(going.trainer), expected)


@pytest.mark.parametrize("rule", ["muon", "adafactor"])
def test_ranks_of_two_gpus_have_the_bits_of_two_on_cpus(
    model: Path, rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs, spec = graphs_in(tmp_path, model, rule, "both")
    # Samples without a usable gradient on one rank alone.
    steps = [steps_of([[8]] * 12, damaged=(2, 7)), steps_of([[8]] * 13)[1:]]
    write_update(graphs, spec)

    def on_cpu(below: Communicator) -> tuple[list[StepOutcome], dict[str, Array]]:
        going = Going(opened(graphs, spec, below))
        return going.go(steps[below.rank]), state_of(going.trainer)

    expected = on_threads(2, on_cpu)
    assert [number for number, outcome in enumerate(expected[0][0]) if outcome.skipped] == [2, 7]
    library, fakes, opening = LazyNccl(), [Fake(monkeypatch, LazyCuda()) for _ in range(2)], threading.Lock()
    fakes[0].trainer(graphs, spec, begins=True)

    def on_gpu(below: Communicator) -> tuple[list[StepOutcome], dict[str, Array]]:
        fake = fakes[below.rank]
        assert isinstance(fake.library, LazyCuda)
        library.here(fake.library)
        fake.device.owner = threading.get_ident()
        world = NcclCommunicator(below, fake.device, library)
        with opening:
            sessions = Sessions(fake.device, 1, "error", fuse=False)
            trainer = open_trainer(graphs, spec, sessions, world, Report(note=fake.log.append), loop="queued")
        trainer.load_tensors(load_file(graphs.initial))
        going = Going(trainer)
        found = going.go(steps[below.rank], ahead=True), state_of(trainer)
        assert rank_has(fake.log, "the update is captured as a CUDA graph", below.rank)
        trainer.end_training()
        world.close()
        return found

    for (outcomes, state), (theirs, ended) in zip(on_threads(2, on_gpu), expected, strict=True):
        alike(outcomes, theirs)
        same(state, ended)


def rank_has(log: list[str], line: str, rank: int) -> bool:
    """Rank 0 writes what is captured."""
    return (line in log) == (rank == 0)
