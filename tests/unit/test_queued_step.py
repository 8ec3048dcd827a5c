"""The trainer for GPUs on a fake GPU: the CPU's bits, captured or not; skips are decided on the device."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graph_build_models import Array, built, run_file
from kernels import LIBRARY, needs_kernels
from messages import alike, says
from queued import Fake, halved, network, outcomes_of, state_of, steps_of, train
from trainers import opened, trainer_on, write_update

from ortflow.workflow.comm.solo import SoloCommunicator
from ortflow.workflow.device import Buffer
from ortflow.workflow.errors import OrtflowError
from ortflow.workflow.graph.forms import Form
from ortflow.workflow.graph.types import LOSS_SUM, GraphSet
from ortflow.workflow.run.progress import Progress
from ortflow.workflow.sessions.binding import Binding
from ortflow.workflow.trainer import StepOutcome
from ortflow.workflow.trainer.step import GraphTrainer

OPTIMIZERS = [
    {"name": "adamw", "lr": 1e-3, "weight_decay": 0.1},
    {"name": "adam", "lr": 1e-3, "weight_decay": 0.1},
    {"name": "lamb", "lr": 1e-3, "weight_decay": 0.1},
    {"name": "sgd", "lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1},
]
CAPTURED = ["a micro-batch", "the scaling of the gradient", "the update", "the change of the running statistics"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five numbers to three classes through BatchNormalization."""
    return network(tmp_path_factory.mktemp("model") / "model.onnx")


@pytest.fixture(scope="module")
def graphs(model: Path) -> GraphSet:
    return built(model)


@pytest.mark.parametrize("refuses", [False, True])
def test_captured_graphs_are_edited_before_they_are_made(
    model: Path, graphs: GraphSet, refuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Fake(monkeypatch)
    made: list[int] = []
    edited: list[int] = []
    instantiate = fake.library.cudaGraphInstantiate

    def edit(graph: int) -> None:
        assert graph in fake.library.graphs
        assert graph not in made
        edited.append(graph)
        if refuses:
            raise OrtflowError("this graph stays as it is")

    def noted(place: Any, graph: Any, flags: Any) -> int:
        made.append(graph.value)
        return instantiate(place, graph, flags)

    monkeypatch.setattr(fake.library, "cudaGraphInstantiate", noted)
    fake.device.edits.append(edit)
    train(fake.trainer(graphs, run_file(model, resources__kernels="onnxruntime")), steps_of([[8]] * 8))
    assert len(edited) == len(CAPTURED)
    assert made == ([] if refuses else edited)
    end = "is not captured as a CUDA graph: this graph stays as it is" if refuses else "is captured as a CUDA graph"
    assert sorted(fake.log) == sorted(f"{name} {end}" for name in CAPTURED)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer["name"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_curve_is_the_cpu_s_to_the_bit_captured_or_not(
    model: Path, graphs: GraphSet, optimizer: dict[str, Any], accumulation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: dict[str, Any] = {
        "train__optimizer": optimizer,
        "train__gradient_accumulation": accumulation,
        "train__clip_norm": 1.0,
        "resources__kernels": "onnxruntime",
    }
    # Some smaller last batches, and samples without a usable gradient.
    sizes = [[8] * accumulation if step % 7 != 5 else [8] * (accumulation - 1) + [5] for step in range(30)]
    steps, damaged = steps_of(sizes, damaged=(2, 9, 10, 20)), {2, 9, 10, 20}
    on_cpu = trainer_on(graphs, run_file(model, **changes))
    expected, state = train(on_cpu, steps), state_of(on_cpu)
    assert {step for step, (*_, skipped) in enumerate(expected) if skipped} == damaged
    for captures in (True, False):
        fake = Fake(monkeypatch)
        changes["resources__cuda_graph"] = captures
        trainer = fake.trainer(graphs, run_file(model, **changes))
        for mine, theirs in zip(train(trainer, steps), expected, strict=True):
            np.testing.assert_array_equal(mine[:2], theirs[:2])
            assert mine[2] == theirs[2]
        for name, flat in state_of(trainer).items():
            np.testing.assert_array_equal(flat, state[name], err_msg=name)
        launched = [call for call in fake.library.calls if call[0] == "cudaGraphLaunch"]
        assert bool(launched) == captures
        if captures:
            named = [*CAPTURED, "another micro-batch"] if accumulation > 1 else CAPTURED
            assert sorted(fake.log) == sorted(f"{name} is captured as a CUDA graph" for name in named)
        else:
            assert not fake.log
        monkeypatch.undo()


def test_a_step_waits_once(model: Path, graphs: GraphSet, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"train__gradient_accumulation": 3, "train__clip_norm": 1.0}
    fake = Fake(monkeypatch)
    trainer = fake.trainer(graphs, run_file(model, **changes))
    steps = steps_of([[8] * 3] * 12)
    train(trainer, steps[:6])
    calls = fake.library.calls
    calls.clear()
    train(trainer, steps[6:7])
    assert not [call for call in calls if call[0] == "cudaStreamSynchronize"]
    waits = [event for name, event in calls if name == "cudaEventSynchronize"]
    # The waits for pinned memory ended long ago: it was copied from two batches before.
    last = waits[-1]
    assert waits.count(last) == 1
    recorded = calls.index(("cudaEventRecord", last))
    launches = [place for place, (name, _) in enumerate(calls) if name == "cudaGraphLaunch"]
    assert len(launches) == 6, "three micro-batches, the scaling, the update and the running statistics"
    assert launches[3] < recorded < launches[4] < launches[5] < calls.index(("cudaEventSynchronize", last))


def test_nothing_that_a_checkpoint_holds_moves_before_it_is_asked_for(
    model: Path, graphs: GraphSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Fake(monkeypatch)
    trainer = fake.trainer(graphs, run_file(model))
    before: list[dict[str, Array]] = [state_of(trainer)]
    asked: list[dict[str, Array]] = []
    trainer.before_update = lambda: asked.append(state_of(trainer))
    for batches in steps_of([[8]] * 8, damaged=(3,)):
        trainer.step(batches, learning_rate=1e-3, update=1, seeds=[1], control_values=[])
        before.append(state_of(trainer))
    assert len(asked) == 8
    for mine, theirs in zip(asked, before, strict=False):
        for name, flat in mine.items():
            np.testing.assert_array_equal(flat, theirs[name])
    assert not np.array_equal(before[0]["parameters"], before[1]["parameters"])
    np.testing.assert_array_equal(before[3]["parameters"], before[4]["parameters"])


def test_memory_that_is_given_back_ends_the_graphs_that_use_it(
    model: Path, graphs: GraphSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Fake(monkeypatch)
    trainer = fake.trainer(graphs, run_file(model))
    steps = steps_of([[8]] * 12)
    train(trainer, steps[:6])
    assert len(fake.library.graphs) == len(CAPTURED)
    trainer.give_memory_back()
    assert not fake.library.graphs
    fake.library.calls.clear()
    train(trainer, steps[6:9])
    assert not [call for call in fake.library.calls if call[0] == "cudaGraphLaunch"]
    train(trainer, steps[9:])
    assert len(fake.library.graphs) == len(CAPTURED)


def test_memory_that_is_given_back_costs_no_step(
    model: Path, graphs: GraphSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scaling of an unusable gradient frees it."""
    steps, outcomes = steps_of([[8]] * 6), []
    for giving in (False, True):
        trainer = Fake(monkeypatch).trainer(graphs, run_file(model))
        found = []
        for number, batches in enumerate(steps):
            if giving and number in (0, 3):
                trainer.give_memory_back()
            outcome = trainer.step(batches, learning_rate=1e-3, update=number + 1, seeds=[1], control_values=[])
            found.append((outcome.loss, outcome.grad_norm, outcome.skipped))
        outcomes.append(found)
    assert outcomes[0] == outcomes[1]
    assert all(skipped is None for *_, skipped in outcomes[0])


def test_a_session_that_is_opened_ends_the_graphs_whose_memory_it_may_get(
    model: Path, graphs: GraphSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Fake(monkeypatch)
    trainer = fake.trainer(graphs, run_file(model))
    train(trainer, steps_of([[8]] * 6))
    assert len(fake.library.graphs) == len(CAPTURED)
    fake.sessions.exact().open(graphs.eval)
    assert not fake.library.graphs


def test_what_copies_from_the_host_is_not_captured(
    model: Path, graphs: GraphSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Fake(monkeypatch)
    trainer = fake.trainer(graphs, run_file(model))
    number, target = np.full(1, 1e-3, np.float32), fake.device.allocate(1, np.float32)

    def copy(binding: Binding) -> None:
        if "parameters.0.out" in binding.outputs:
            fake.device.copy(target.pointer, number.ctypes.data, 4, 3)

    fake.on_run = copy
    train(trainer, steps_of([[8]] * 6))
    assert any(says(line, "the update … not captured … a copy from the host") for line in fake.log)
    assert fake.log.count("a micro-batch is captured as a CUDA graph") == 1
    assert len(fake.library.graphs) == len(CAPTURED) - 1


def test_work_that_waits_runs_without_capture(model: Path, graphs: GraphSet, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = train(Fake(monkeypatch).trainer(graphs, run_file(model)), steps_of([[8]] * 6))
    monkeypatch.undo()
    fake = Fake(monkeypatch)
    trainer = fake.trainer(graphs, run_file(model))
    held = fake.device.allocate(1, np.float32)

    def wait(binding: Binding) -> None:
        if LOSS_SUM in binding.outputs:
            held.read()

    fake.on_run = wait
    assert train(trainer, steps_of([[8]] * 6)) == expected
    (line,) = [line for line in fake.log if "not captured" in line]
    assert says(line, "a micro-batch … not captured … NVIDIA Fake failed: error 900 (CUDA error 900)")


def test_dropout_of_onnx_runtime_is_not_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = network(tmp_path / "model.onnx", "Dropout")
    fake = Fake(monkeypatch)
    graphs = built(model)
    operators = {node.op_type for node in onnx.load(graphs.train).graph.node}
    assert "Dropout" in operators
    train(fake.trainer(graphs, run_file(model)), steps_of([[8]] * 6))
    why = "Dropout … the same numbers"
    captured = [f"{name} is captured …" for name in CAPTURED[1:]]
    assert alike(fake.log, [f"a micro-batch … not captured … {why}", *captured])


@needs_kernels
@pytest.mark.parametrize("accumulation", [1, 3])
def test_dropout_of_ortflow_is_captured_and_draws_from_each_seed(
    tmp_path: Path, accumulation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bits of a CPU, whose kernel has the masks of a GPU's."""
    model, seeds = network(tmp_path / "model.onnx", "Dropout"), iter(range(100, 1000))
    graphs, steps = built(model), steps_of([[8] * accumulation] * 8)
    drawn = [[next(seeds) for _ in batches] for batches in steps]
    changes: dict[str, Any] = {"train__gradient_accumulation": accumulation}
    ours = onnx.load(Form.KERNELS.of(graphs.train))
    assert "Dropout" in {node.op_type for node in ours.graph.node if node.domain == "ortflow"}

    def on_cpu() -> GraphTrainer:
        spec = run_file(model, **changes)
        write_update(graphs, spec)
        # Only the training graph has ortflow's kernels, so that everything else has the same bits.
        for graph in (graphs.optimizer, graphs.gradient):
            Form.KERNELS.of(graph).unlink()
        return opened(graphs, spec, SoloCommunicator())

    def outcomes(trainer: GraphTrainer, given: list[list[int]]) -> list[float]:
        return [
            trainer.step(batches, learning_rate=1e-3, update=number + 1, seeds=each, control_values=[]).loss
            for number, (batches, each) in enumerate(zip(steps, given, strict=True))
        ]

    alone = on_cpu()
    expected, state = outcomes(alone, drawn), state_of(alone)
    assert outcomes(on_cpu(), [[7] * accumulation] * 8) != expected
    fake = Fake(monkeypatch)
    trainer = fake.trainer(graphs, run_file(model, **changes), train=ours, kernels=LIBRARY.path)
    assert outcomes(trainer, drawn) == expected
    for name, flat in state_of(trainer).items():
        np.testing.assert_array_equal(flat, state[name], err_msg=name)
    launched = [call for call in fake.library.calls if call[0] == "cudaGraphLaunch"]
    assert "a micro-batch is captured as a CUDA graph" in fake.log
    assert len(launched) > 8


class Twins(SoloCommunicator):
    """Two ranks with the same values."""

    world_size = 2

    def all_reduce(self, buffer: Buffer) -> None:
        buffer.add(buffer)


def test_running_statistics_are_the_mean_of_the_ranks(
    model: Path, graphs: GraphSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Fake(monkeypatch)
    alone, twins = (fake.trainer(graphs, run_file(model), world) for world in (None, Twins()))
    steps = steps_of([[8]] * 6)
    outcomes: list[list[StepOutcome]] = [
        [trainer.step(batches, learning_rate=1e-3, update=1, seeds=[1], control_values=[1.0]) for batches in steps]
        for trainer in (alone, twins)
    ]
    for one, two in zip(*outcomes, strict=True):
        assert (two.loss, two.samples, two.control_values) == (one.loss, 2 * one.samples, 2 * one.control_values)
    for name, flat in state_of(twins).items():
        np.testing.assert_array_equal(flat, state_of(alone)[name], err_msg=name)


def test_overflows_are_skipped_until_the_scale_fits_and_a_run_resumes_bit_for_bit(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(model, tmp_path / "model.onnx")
    graphs = built(tmp_path / "model.onnx")
    whole, part = halved(onnx.load(graphs.train)), 4
    spec = run_file(model, train__clip_norm=1.0)
    steps = steps_of([[8]] * 14)
    fake = Fake(monkeypatch)
    trainer = fake.trainer(graphs, spec, train=whole)
    outcomes = outcomes_of(trainer, steps)
    overflows = [number for number, outcome in enumerate(outcomes) if outcome.overflow]
    assert overflows[0] == 0
    assert overflows[-1] >= part, "one after the checkpoint, too"
    assert len(overflows) < 10
    first = next(number for number in range(14) if number not in overflows)
    for number in overflows[:first]:
        assert outcomes[number].skipped == f"overflow at loss scale {65536 / 2**number:g}"
        assert np.isfinite(outcomes[number].loss)
    assert all(outcome.overflow == (outcome.skipped is not None) for outcome in outcomes)
    assert trainer.numbers()["loss_scale"] == 65536 / 2 ** len(overflows)

    before = Fake(monkeypatch).trainer(graphs, spec, train=whole)
    done = outcomes_of(before, steps[:part])
    progress = Progress(trainer=dict(before.numbers()))
    kept = Progress.from_json(json.loads(json.dumps(progress.to_json()))).trainer
    after = Fake(monkeypatch).trainer(graphs, spec, train=whole)
    for name, buffer in after.state().items():
        buffer.write(before.state()[name].read())
    after.restore(kept)
    done += outcomes_of(after, steps[part:], updates=sum(outcome.skipped is None for outcome in done))
    for mine, theirs in zip(done, outcomes, strict=True):
        np.testing.assert_array_equal([mine.loss, mine.grad_norm], [theirs.loss, theirs.grad_norm])
        assert (mine.skipped, mine.overflow) == (theirs.skipped, theirs.overflow)
    assert after.numbers() == trainer.numbers()
    for name, flat in state_of(trainer).items():
        np.testing.assert_array_equal(flat, state_of(after)[name], err_msg=name)


def test_an_overflow_that_no_scale_helps_is_a_fault(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(model, tmp_path / "model.onnx")
    graphs = built(tmp_path / "model.onnx")
    whole, steps = halved(onnx.load(graphs.train)), steps_of([[8]] * 4, damaged=(3,))
    trainer = Fake(monkeypatch).trainer(graphs, run_file(model), train=whole)
    trainer.restore({"loss_scale": 1.0})
    for batches in steps[:2]:
        # The loss is finite, and its gradient too large for fp16.
        trainer.load_tensors({**trainer_tensors(trainer), "u": np.full((7, 3), 1e6, np.float32) * [1, 2, -3]})
        (outcome,) = outcomes_of(trainer, [batches])
        assert np.isfinite(outcome.loss)
        assert not outcome.overflow
        assert outcome.skipped in ("the gradient norm is inf", "the gradient norm is nan")
    given = run_file(model, train__loss_scale=2.0**40)
    fixed = Fake(monkeypatch).trainer(graphs, given, train=whole)
    healthy, damaged = outcomes_of(fixed, steps[2:])
    assert (healthy.skipped, healthy.overflow) == ("overflow at loss scale 1.09951e+12", False)
    assert (damaged.skipped, damaged.overflow) == ("the loss is nan", False), "the loss itself is not scaled"
    assert fixed.numbers() == {}


def trainer_tensors(trainer: GraphTrainer) -> dict[str, Array]:
    flat = trainer.state()["parameters"].read()
    return {entry.name: flat[entry.offset : entry.end] for entry in trainer.index}


@pytest.mark.parametrize(("factor", "warned"), [(1.0, False), (8.0, False), (-1.0, True)])
def test_a_gradient_of_training_that_points_elsewhere_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: float, warned: bool
) -> None:
    model = network(tmp_path / "model.onnx")
    graphs = built(model)
    plain, whole = onnx.load(graphs.train), onnx.load(graphs.train)
    for node in whole.graph.node:
        node.output[:] = ["made" if name == "w_grad" else name for name in node.output]
    whole.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(factor), "factor"))
    whole.graph.node.append(onnx.helper.make_node("Mul", ["made", "factor"], ["w_grad"]))
    fake = Fake(monkeypatch)
    trainer = fake.trainer(graphs, run_file(model, resources__kernels="onnxruntime"), train=whole, single=plain)
    assert trainer.training.checker.gradient.run(steps_of([[8]])[0][0], 0) is not None
    assert bool(fake.warnings) == warned, fake.warnings
    assert all("'w'" in line and "100%" in line for line in fake.warnings)


@pytest.mark.parametrize("scaled", [False, True], ids=["bf16", "fp16"])
def test_the_comparison_of_precisions_leaves_the_steps_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scaled: bool
) -> None:
    """Without a loss scale of its own, as in bf16 and TF32, a gradient was divided by the comparison's."""
    model = network(tmp_path / "model.onnx")
    graphs = built(model)
    plain = onnx.load(graphs.train)
    found = []
    for compared in (False, True):
        whole = halved(plain) if scaled else plain
        trainer = Fake(monkeypatch).trainer(graphs, run_file(model), train=whole, single=plain)
        if compared:
            assert trainer.training.checker.gradient.run(steps_of([[8]])[0][0], 0) is not None
        found.append((train(trainer, steps_of([[8]] * 6)), state_of(trainer)))
        monkeypatch.undo()
    (mine, state_mine), (theirs, state_theirs) = found
    np.testing.assert_array_equal([one[:2] for one in mine], [one[:2] for one in theirs])
    for name, flat in state_theirs.items():
        np.testing.assert_array_equal(state_mine[name], flat, err_msg=name)
