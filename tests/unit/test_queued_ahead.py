"""Steps on a fake GPU whose passes begin while the host waits for the step before: the bits of steps one by one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from fake_cuda import FakeCuda
from graph_build_models import Array, built, run_file
from queued import Fake, halved, network, outcomes_of, state_of, steps_of
from shuffled_cuda import ShuffledCuda
from trainers import trainer_on

from ortflow.workflow.device.cuda import CudaDevice
from ortflow.workflow.errors import OrtflowError
from ortflow.workflow.graph.types import GraphSet
from ortflow.workflow.onnx_runtime import onnxruntime
from ortflow.workflow.optim.after_step import loss_scale_graph, statistics_graph
from ortflow.workflow.trainer import StepOutcome
from ortflow.workflow.trainer.loss_scale import LARGEST, PERIOD, SMALLEST, LossScale
from ortflow.workflow.trainer.step import GraphTrainer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five numbers to three classes through BatchNormalization."""
    return network(tmp_path_factory.mktemp("model") / "model.onnx")


@pytest.fixture(scope="module")
def graphs(model: Path) -> GraphSet:
    return built(model)


def check_alike(mine: list[StepOutcome], theirs: list[StepOutcome], *states: dict[str, Array]) -> None:
    for one, other in zip(mine, theirs, strict=True):
        np.testing.assert_array_equal([one.loss, one.grad_norm], [other.loss, other.grad_norm])
        assert (one.skipped, one.overflow, one.samples) == (other.skipped, other.overflow, other.samples)
        assert one.control_values == other.control_values == [2.0]
    one_state, other_state = states
    for name, flat in one_state.items():
        np.testing.assert_array_equal(flat, other_state[name], err_msg=name)


@pytest.mark.parametrize("captures", [True, False])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("late", [None, 1, 2, 3])
def test_the_bits_are_those_of_steps_one_by_one_and_of_a_cpu(
    model: Path, graphs: GraphSet, accumulation: int, late: int | None, *, captures: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    damaged = (2, 9, 10, 20)
    changes: dict[str, Any] = {"train__gradient_accumulation": accumulation, "resources__kernels": "onnxruntime"}
    # Work that the fake does late has the shapes of the batch that was fed last.
    smaller = 8 if late else 5
    sizes = [[8] * accumulation if step % 7 != 5 else [8] * (accumulation - 1) + [smaller] for step in range(24)]
    steps = steps_of(sizes, damaged=damaged)
    on_cpu = trainer_on(graphs, run_file(model, **changes))
    expected, state = outcomes_of(on_cpu, steps), state_of(on_cpu)
    assert [number for number, each in enumerate(expected) if each.skipped] == list(damaged)
    spec = run_file(model, resources__cuda_graph=captures, **changes)
    for ahead in (False, True):
        library = FakeCuda() if late is None else ShuffledCuda(late)
        trainer = Fake(monkeypatch, library).trainer(graphs, spec, begins=True)
        check_alike(outcomes_of(trainer, steps, ahead=ahead), expected, state_of(trainer), state)
        monkeypatch.undo()


def test_where_gradients_are_scaled_in_place_no_step_begins(
    model: Path, graphs: GraphSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not Fake(monkeypatch).trainer(graphs, run_file(model)).begins


def test_the_host_waits_for_a_loss_while_the_next_step_s_passes_are_queued(
    model: Path, graphs: GraphSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Fake(monkeypatch)
    trainer = fake.trainer(graphs, run_file(model), begins=True)
    steps = steps_of([[8]] * 12)
    outcomes_of(trainer, steps)
    calls, mark = fake.library.calls, CudaDevice.settle
    monkeypatch.setattr(CudaDevice, "settle", lambda device: (calls.append(("settle", 0)), mark(device)))
    calls.clear()
    outcomes_of(trainer, steps[:2])
    last = [event for name, event in calls if name == "cudaEventSynchronize"][-1]
    read = [place for place, call in enumerate(calls) if call == ("cudaEventSynchronize", last)]
    recorded = [place for place, call in enumerate(calls) if call == ("cudaEventRecord", last)]
    launches = [place for place, (name, _) in enumerate(calls) if name == "cudaGraphLaunch"]
    passes, scaling, update, statistics, following = launches[:5]
    assert passes < scaling < recorded[0] < update < statistics < following < read[0] < launches[5]
    assert statistics < calls.index(("settle", 0)) < following, "a checkpoint does not wait for the next passes"


def test_a_step_that_has_begun_changes_nothing_that_is_saved(
    model: Path, graphs: GraphSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Fake(monkeypatch).trainer(graphs, run_file(model), begins=True)
    steps = steps_of([[8]] * 8, damaged=(3,))
    between: list[dict[str, Array]] = []
    asked: list[dict[str, Array]] = []
    trainer.before_update = lambda: asked.append(state_of(trainer))
    for number, batches in enumerate(steps):

        def begin(number: int = number) -> None:
            between.append(state_of(trainer))
            for following in steps[number + 1 : number + 2]:
                trainer.begin(following, seeds=[1], control_values=[])

        trainer.before_wait = begin
        trainer.step(batches, learning_rate=1e-3, update=1, seeds=[1], control_values=[])
        for name, flat in state_of(trainer).items():
            np.testing.assert_array_equal(flat, between[-1][name], err_msg=name)
    for mine, theirs in zip(asked[1:], between, strict=False):
        for name, flat in mine.items():
            np.testing.assert_array_equal(flat, theirs[name], err_msg=name)
    assert not np.array_equal(between[0]["parameters"], between[1]["parameters"])


@pytest.fixture(scope="module")
def in_fp16(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[GraphSet, onnx.ModelProto]:
    folder = tmp_path_factory.mktemp("fp16")
    shutil.copy(model, folder / "model.onnx")
    graphs = built(folder / "model.onnx")
    return graphs, halved(onnx.load(graphs.train))


@pytest.mark.parametrize("period", [2, PERIOD])
def test_the_loss_scale_is_that_of_steps_one_by_one(
    model: Path, in_fp16: tuple[GraphSet, onnx.ModelProto], period: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs, whole = in_fp16
    steps = steps_of([[8]] * 20, damaged=(12,))

    def made() -> GraphTrainer:
        for module in ("loss_scale", "device_scale"):
            monkeypatch.setattr(f"ortflow.workflow.trainer.{module}.PERIOD", period)
        return Fake(monkeypatch).trainer(graphs, run_file(model, train__clip_norm=1.0), train=whole, begins=True)

    alone, ahead = made(), made()
    expected = outcomes_of(alone, steps, ahead=False)
    overflows = [number for number, outcome in enumerate(expected) if outcome.overflow]
    assert overflows[:2] == [0, 1]
    assert (max(overflows) > 14) == (period == 2), "it is doubled again"
    check_alike(outcomes_of(ahead, steps), expected, state_of(ahead), state_of(alone))
    assert ahead.numbers() == alone.numbers()
    again, resumed, part = made(), made(), 14
    done = outcomes_of(again, steps[:part])
    for name, buffer in resumed.state().items():
        buffer.write(again.state()[name].read())
    assert again.numbers()["loss_scale_good_steps"] > 0, "so that another value would show"
    resumed.restore(again.numbers())
    done += outcomes_of(resumed, steps[part:], updates=sum(each.skipped is None for each in done))
    check_alike(done, expected, state_of(resumed), state_of(alone))
    assert resumed.numbers() == alone.numbers()


def test_a_scale_of_the_run_file_stays(
    model: Path, in_fp16: tuple[GraphSet, onnx.ModelProto], monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs, whole = in_fp16
    spec = run_file(model, train__loss_scale=2.0**30)
    trainer = Fake(monkeypatch).trainer(graphs, spec, train=whole, begins=True)
    outcomes = outcomes_of(trainer, steps_of([[8]] * 3))
    assert [each.skipped for each in outcomes] == ["overflow at loss scale 1.07374e+09"] * 3


def test_a_scale_that_the_host_does_not_know_ends_the_run(
    model: Path, in_fp16: tuple[GraphSet, onnx.ModelProto], monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs, whole = in_fp16
    trainer = Fake(monkeypatch).trainer(graphs, run_file(model), train=whole, begins=True)
    monkeypatch.setattr(LossScale, "after", lambda rule, overflow: rule)
    with pytest.raises(OrtflowError, match=r"the GPU's loss scale is 32768, and the host's 65536"):
        outcomes_of(trainer, steps_of([[8]] * 3))


@pytest.mark.parametrize("unit", [1.0, 2.0**-13])
@pytest.mark.parametrize("seed", range(5))
def test_the_graph_of_the_loss_scale_has_the_rule_of_the_host(unit: float, seed: int) -> None:
    random, period = np.random.default_rng(seed), 4
    session = onnxruntime.InferenceSession(
        loss_scale_graph(SMALLEST * unit, LARGEST * unit, period).SerializeToString(),
        providers=["CPUExecutionProvider"],
    )
    rule = LossScale(float(2.0 ** random.integers(0, 25)), int(random.integers(0, period)))
    given = {"scale": np.float32([rule.value * unit]), "good": np.float32([rule.good])}
    for _ in range(200):
        kind = random.choice(["works", "overflows", "not finite", "no labels"], p=[0.5, 0.3, 0.1, 0.1])
        loss, weight = {"not finite": (np.nan, 1.0), "no labels": (0.0, 0.0)}.get(kind, (random.normal(), 7.0))
        sums = {"loss": loss, "weight": weight, "useful": float(kind == "works")}
        scale, good = session.run(None, {**given, **{name: np.float32([value]) for name, value in sums.items()}})
        if kind in ("works", "overflows"):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("ortflow.workflow.trainer.loss_scale.PERIOD", period)
                rule = rule.after(kind == "overflows")
        assert (scale[0], good[0]) == (np.float32(rule.value * unit), rule.good), kind
        given = {"scale": scale, "good": good}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_graph_of_the_running_statistics(ranks: int) -> None:
    session = onnxruntime.InferenceSession(
        statistics_graph(ranks).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    random = np.random.default_rng(0)
    new, state = (random.normal(size=9).astype(np.float32) for _ in range(2))
    (mean,) = session.run(None, {"statistics": new, "state": state, "useful": np.float32([1])})
    np.testing.assert_array_equal(mean, new * np.float32(1 / ranks))
    new[3] = np.nan
    (kept,) = session.run(None, {"statistics": new, "state": state, "useful": np.float32([0])})
    np.testing.assert_array_equal(kept, state)
