"""Averages, frozen groups, Muon and Adafactor on a fake GPU: the CPU's bits, captured or not; skips; resumed steps."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graph_build_models import Array, built, run_file
from onnx import TensorProto
from queued import Fake, FakeDevice, halved, network, state_of, steps_of
from safetensors.numpy import load_file
from test_queued_rounded import with_casts
from trainers import trainer_on

from ortflow.workflow.fusion.rounded import writing_rounded
from ortflow.workflow.graph.types import GraphSet
from ortflow.workflow.optim.average import average_rate
from ortflow.workflow.run.pace import pace_of_steps
from ortflow.workflow.sessions.session import Sessions
from ortflow.workflow.spec.averages import Ema
from ortflow.workflow.spec.run import TrainerRunSpec
from ortflow.workflow.trainer import MicroBatch, StepOutcome
from ortflow.workflow.trainer.queued_work import QueuedWork
from ortflow.workflow.trainer.rounded import Rounded
from ortflow.workflow.trainer.step import GraphTrainer

RULES: dict[str, dict[str, Any]] = {
    "adamw": {"name": "adamw", "lr": 1e-2, "weight_decay": 0.1},
    "sgd": {"name": "sgd", "lr": 1e-2, "momentum": 0.9},
    "muon": {"name": "muon", "lr": 0.02, "adamw": ["u"], "weight_decay": 0.1},
    "adafactor": {"name": "adafactor", "lr": 0.05},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "average": {"train__average": {"name": "ema", "decay": 0.8, "start": "3 steps"}},
    "frozen": {
        "train__groups": [
            {"match": ["w", "scale"], "frozen_until": "4 steps"}, {"match": ["u"], "frozen_until": "6 steps"},
        ]
    },
}  # fmt: skip
OPTIONS["both"] = {**OPTIONS["average"], **OPTIONS["frozen"]}
CASES = [
    (rule, options) for rule in RULES for options in OPTIONS if rule in ("muon", "adafactor") or options != "plain"
]
SECTION = Ema.model_validate(OPTIONS["average"]["train__average"])
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


class Going:
    """A run's position, and the steps of a trainer from there."""

    def __init__(self, trainer: GraphTrainer) -> None:
        self.trainer, self.step, self.updates, self.averaged = trainer, 0, 0, 0

    def go(self, steps: list[list[MicroBatch]], *, ahead: bool = False) -> list[StepOutcome]:
        """Every step; with `ahead` the passes of the next one begin while the host waits."""
        trainer, outcomes = self.trainer, list[StepOutcome]()

        def begin() -> None:
            for batches in steps[len(outcomes) + 1 : len(outcomes) + 2]:
                trainer.begin(batches, seeds=[1] * len(batches), control_values=[])

        trainer.before_wait = begin if ahead and trainer.begins else lambda: None
        for batches in steps:
            pace = pace_of_steps(self.step + 1)
            rate, counts = average_rate(SECTION, pace, self.averaged)
            trainer.at(pace, rate)
            outcome = trainer.step(
                batches, learning_rate=1e-2 / (1 + self.step), update=self.updates + 1, seeds=[1] * len(batches),
                control_values=[],
            )  # fmt: skip
            self.step += 1
            self.updates += outcome.skipped is None
            self.averaged += counts and outcome.skipped is None
            outcomes.append(outcome)
        return outcomes


def same(one: dict[str, Array], other: dict[str, Array]) -> None:
    assert one.keys() == other.keys()
    for name, values in one.items():
        np.testing.assert_array_equal(values, other[name], err_msg=name)


def alike(one: list[StepOutcome], other: list[StepOutcome]) -> None:
    np.testing.assert_array_equal([(o.loss, o.grad_norm) for o in one], [(o.loss, o.grad_norm) for o in other])
    assert [o.skipped for o in one] == [o.skipped for o in other]


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


@pytest.mark.parametrize("rule", RULES)
def test_overflows_leave_moments_average_and_counters(
    model: Path, rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a run resumes from between them bit by bit."""
    graphs, spec = graphs_in(tmp_path, model, rule, "both")
    whole, steps, fake = halved(onnx.load(graphs.train)), steps_of([[8]] * STEPS), Fake(monkeypatch)
    going = Going(fake.trainer(graphs, spec, train=whole, begins=True))
    for batches in steps[:3]:
        before, numbers = state_of(going.trainer), dict(going.trainer.numbers())
        (outcome,) = going.go([batches])
        if outcome.overflow:
            assert {"parameters", "average"} <= before.keys()
            same(state_of(going.trainer), before)
            assert numbers.items() - {("loss_scale", numbers["loss_scale"])} <= dict(going.trainer.numbers()).items()
    assert going.updates < 3, "a step overflows"
    resumed = Going(Fake(monkeypatch).trainer(graphs, spec, train=whole, begins=True))
    for name, buffer in resumed.trainer.state().items():
        buffer.write(going.trainer.state()[name].read())
    resumed.trainer.restore(going.trainer.numbers())
    resumed.step, resumed.updates, resumed.averaged = going.step, going.updates, going.averaged
    found, expected = resumed.go(steps[3:]), going.go(steps[3:], ahead=True)
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
    expected, going = state_of(whole.trainer), Going(trainer_on(graphs, spec))
    for first, gpu in ((0, True), (3, False), (5, True), (10, False)):
        trainer = Fake(monkeypatch).trainer(graphs, spec, begins=True) if gpu else trainer_on(graphs, spec)
        if first:
            for name, buffer in trainer.state().items():
                buffer.write(going.trainer.state()[name].read())
            trainer.restore(going.trainer.numbers())
        else:
            trainer.load_tensors(load_file(graphs.initial))
        going.trainer = trainer
        going.go(steps[first : {0: 3, 3: 5, 5: 10, 10: 16}[first]])
        monkeypatch.undo()
    same(state_of(going.trainer), expected)
