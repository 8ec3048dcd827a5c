"""ZeRO on GPUs, on fake ones: ranks are threads, NCCL copies host memory. The curve is that of CPU ranks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graph_build_models import Array, built, run_file
from queued import Fake, halved, outcomes_of, state_of
from safetensors.numpy import load_file
from sharing_ranks import perceptron
from thread_nccl import ThreadNccl
from thread_wire import on_threads
from trainers import trainer_on

from ortflow.workflow.comm import Communicator
from ortflow.workflow.comm.nccl import NcclCommunicator
from ortflow.workflow.comm.staged import StagedCommunicator
from ortflow.workflow.device.shard import Shard
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.types import GraphSet
from ortflow.workflow.layout import share
from ortflow.workflow.optim.segments import Piece
from ortflow.workflow.sessions.session import Sessions
from ortflow.workflow.spec.run import TrainerRunSpec
from ortflow.workflow.trainer import MicroBatch, Report, StepOutcome
from ortflow.workflow.trainer.context import StepContext
from ortflow.workflow.trainer.opening import LAYOUTS, Assembly, layout_of
from ortflow.workflow.trainer.step import GraphTrainer
from ortflow.workflow.trainer.streamed import groups_of, staging_of

SAMPLES = 24
RULES: dict[str, dict[str, Any]] = {
    "adamw": {"name": "adamw", "lr": 1e-2, "weight_decay": 0.1},
    "adam": {"name": "adam", "lr": 1e-2, "weight_decay": 0.1},
    "lamb": {"name": "lamb", "lr": 1e-2, "weight_decay": 0.1},
    "nesterov": {"name": "sgd", "lr": 1e-2, "weight_decay": 0.1, "momentum": 0.9, "nesterov": True},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return perceptron(tmp_path_factory.mktemp("model") / "model.onnx")


@pytest.fixture(scope="module")
def graphs(model: Path) -> GraphSet:
    return built(model)


def samples(steps: int, damaged: tuple[int, ...] = ()) -> list[dict[str, Array]]:
    """Of all ranks; a damaged step has a NaN in its last one."""
    random, made = np.random.default_rng(1), []
    for step in range(steps):
        x = random.normal(size=(SAMPLES, 5)).astype("float32")
        if step in damaged:
            x[-1, 2] = np.nan
        made.append({"x": x, "labels": random.integers(0, 3, SAMPLES)})
    return made


def divided(
    steps: list[dict[str, Array]], rank: int, ranks: int, micro: int, empty: int | None = None
) -> list[list[MicroBatch]]:
    """A rank's micro-batches; in the step `empty` the last rank's last one has no samples."""
    size, made = SAMPLES // ranks // micro, []
    for number, arrays in enumerate(steps):
        batches = []
        for part in range(micro):
            first = (part * ranks + rank) * size
            last = number == empty and part == micro - 1 and rank == ranks - 1
            mine = {name: array[first : first + size] for name, array in arrays.items()}
            batches.append(MicroBatch(mine, 0 if last else size))
        made.append(batches)
    return made


class Rank:
    """What a rank has after its steps."""

    def __init__(self, trainer: GraphTrainer, outcomes: list[StepOutcome], fake: Fake) -> None:
        self.curve = [(each.loss, each.grad_norm) for each in outcomes]
        self.skipped = [number for number, each in enumerate(outcomes) if each.skipped]
        self.overflows = [number for number, each in enumerate(outcomes) if each.overflow]
        state = trainer.state()
        self.starts = {name: each.start if isinstance(each, Shard) else 0 for name, each in state.items()}
        self.state = {name: (each.part if isinstance(each, Shard) else each).read() for name, each in state.items()}
        self.memory, self.log, self.library = dict(trainer.memory()), fake.log, fake.library
        self.held = fake.device.held


def on_gpus(
    fakes: list[Fake],
    graphs: GraphSet,
    spec: TrainerRunSpec,
    steps: list[dict[str, Array]],
    *,
    micro: int = 1,
    empty: int | None = None,
    staged: bool = False,
    train: onnx.ModelProto | None = None,
    start: dict[str, Array] | None = None,
    library: ThreadNccl | None = None,
) -> list[Rank]:
    """Train on as many ranks as there are fake GPUs. `start` is a whole state to begin with."""
    library = library or ThreadNccl()
    if train is not None:
        graphs.train.write_bytes(train.SerializeToString())

    def program(below: Communicator) -> Rank:
        fake = fakes[below.rank]
        world: Communicator = StagedCommunicator(below)
        if not staged:
            world = NcclCommunicator(below, fake.device, library)
        sessions = Sessions(fake.device, 1, "error", fuse=False)
        context = StepContext(graphs, spec, sessions, world, Report(note=fake.log.append))
        # Also in stage 0, whose share is everything: the update is that of shares.
        layout = "ZeRO 1 and 2" if spec.train.offload == "none" else layout_of(spec)
        trainer = Assembly(context, LAYOUTS[layout], "queued").trainer()
        trainer.load_tensors(load_file(graphs.initial))
        for name, values in (start or {}).items():
            buffer = trainer.state()[name]
            part, first = (buffer.part, buffer.start) if isinstance(buffer, Shard) else (buffer, 0)
            part.write(values[first : first + part.count])
        outcomes = outcomes_of(trainer, divided(steps, below.rank, below.world_size, micro, empty))
        found = Rank(trainer, outcomes, fake)
        trainer.end_training()
        if not staged:
            world.close()
        return found

    return on_threads(len(fakes), program)


def whole(ranks: list[Rank], name: str) -> Array:
    """A buffer, assembled from the shares of all ranks."""
    if name == "parameters":
        return ranks[0].state[name]
    return np.concatenate([rank.state[name] for rank in ranks])


def on_cpu(
    graphs: GraphSet, spec: TrainerRunSpec, steps: list[dict[str, Array]]
) -> tuple[list[StepOutcome], GraphTrainer]:
    """One rank with all samples in one micro-batch."""
    trainer = trainer_on(graphs, spec)
    return outcomes_of(trainer, divided(steps, 0, 1, 1)), trainer


def settings(rule: str, zero: int, ranks: int, micro: int, **more: Any) -> dict[str, Any]:
    return {
        "train__optimizer": RULES[rule], "train__clip_norm": 0.1, "train__gradient_accumulation": micro,
        "parallel__zero": zero, "resources__ranks_per_node": ranks, "resources__kernels": "onnxruntime", **more,
    }  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("zero", "ranks", "micro"), [(1, 2, 1), (1, 3, 2), (2, 2, 2), (2, 4, 1), (1, 1, 1)])
def test_the_curve_is_that_of_one_rank_and_a_rank_keeps_its_share(
    model: Path, graphs: GraphSet, rule: str, zero: int, ranks: int, micro: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = settings(rule, zero, ranks, micro)
    damaged = (2, 7)
    steps = samples(10, damaged)
    fakes = [Fake(monkeypatch) for _ in range(ranks)]
    found = on_gpus(fakes, graphs, run_file(model, **changes), steps, micro=micro)
    monkeypatch.undo()
    expected, trainer = on_cpu(graphs, run_file(model, **settings(rule, 0, 1, 1)), steps)
    for rank in found:
        assert rank.skipped == list(damaged)
        for number, (loss, norm) in enumerate(rank.curve):
            if number not in damaged:
                np.testing.assert_allclose([loss, norm], [expected[number].loss, expected[number].grad_norm], 1e-5)
        assert np.array_equal(rank.state["parameters"], found[0].state["parameters"])
        assert rank.curve[0] == found[0].curve[0]
    for name, values in state_of(trainer).items():
        np.testing.assert_allclose(whole(found, name), values, rtol=1e-5, atol=1e-5, err_msg=name)
    trained = graphs.index.trained
    for number, rank in enumerate(found):
        start, stop = share(trained, number, ranks)
        kept = [name for name in rank.state if name != "parameters"]
        assert all((rank.starts[name], rank.state[name].size) == (start, stop - start) for name in kept)
        assert rank.memory["moments"] == 4 * len(kept) * (stop - start)
        accumulated = 0 if micro == 1 else stop - start if zero == 2 else trained
        assert rank.memory["gradients"] == 4 * (trained + accumulated)
        formula = sum(rank.memory[part] for part in ("parameters", "gradients", "moments"))
        # Tail, sums, batches, and numbers that the graphs read.
        assert formula <= rank.held < formula + 16_000


def test_everything_but_the_collectives_is_captured(
    model: Path, graphs: GraphSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, curves = samples(8), []
    for captured in (True, False):
        spec = run_file(model, **settings("lamb", 1, 2, 1, resources__cuda_graph=captured))
        found = on_gpus([Fake(monkeypatch) for _ in range(2)], graphs, spec, steps)
        monkeypatch.undo()
        curves.append([rank.curve for rank in found])
        names = ["a micro-batch", "the change", "the norm of the gradient", "the scaling of the gradient", "the update"]
        lines = [line for line in found[0].log if "captured" in line]
        assert sorted(lines) == ([f"{name} is captured as a CUDA graph" for name in names] if captured else [])
    assert curves[0] == curves[1]


def test_a_step_waits_once_and_calls_nccl_in_one_order(
    model: Path, graphs: GraphSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = ThreadNccl()
    fakes = [Fake(monkeypatch) for _ in range(2)]
    spec = run_file(model, **settings("adamw", 1, 2, 1))
    found = on_gpus(fakes, graphs, spec, samples(7), library=library)
    each = ["ncclReduceScatter", "ncclAllReduce", "ncclAllReduce", "ncclAllGather"]
    assert library.calls == each * 7
    calls = found[0].library.calls
    launches = [place for place, (name, _) in enumerate(calls) if name == "cudaGraphLaunch"]
    last = calls[launches[-8] : launches[-4]]
    assert len(launches) == 4 * 4, "four graphs in each of the last four steps"
    assert not [call for call in last if call[0] == "cudaStreamSynchronize"]


@pytest.mark.parametrize("staged", [False, True])
def test_a_rank_without_samples_takes_part(
    model: Path, graphs: GraphSet, monkeypatch: pytest.MonkeyPatch, *, staged: bool
) -> None:
    steps = samples(6)
    for zero, micro in ((1, 1), (2, 2)):
        spec = run_file(model, **settings("adamw", zero, 2, micro))
        fakes = [Fake(monkeypatch) for _ in range(2)]
        found = on_gpus(fakes, graphs, spec, steps, micro=micro, empty=4, staged=staged)
        monkeypatch.undo()
        kept = list(steps)
        size = SAMPLES // 2 // micro
        kept[4] = {name: array[:-size] for name, array in steps[4].items()}
        trainer = trainer_on(graphs, run_file(model, **settings("adamw", 0, 1, 1)))
        batches = [[MicroBatch(arrays, len(arrays["labels"]))] for arrays in kept]
        expected = outcomes_of(trainer, batches)
        np.testing.assert_allclose([loss for loss, _ in found[1].curve], [each.loss for each in expected], 1e-5)


def test_an_overflow_on_one_rank_is_skipped_by_all(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(model, tmp_path / "model.onnx")
    graphs = built(tmp_path / "model.onnx")
    spec = run_file(model, **settings("adamw", 1, 2, 1), data__micro_batch=12)
    train = halved(onnx.load(graphs.train))
    steps = samples(12)
    for number, arrays in enumerate(steps):
        # Only the second rank's samples are so large that their gradient overflows.
        arrays["x"][12:] *= 50.0 if number == 6 else 1.0
    found = on_gpus([Fake(monkeypatch) for _ in range(2)], graphs, spec, steps, train=train)
    assert found[0].overflows == found[1].overflows == found[0].skipped == found[1].skipped
    assert found[0].overflows, "the scale is too small for the test"
    assert np.array_equal(found[0].state["parameters"], found[1].state["parameters"])
    assert np.isfinite(found[0].state["parameters"]).all()
    assert all(np.isfinite(rank.state[name]).all() for rank in found for name in rank.state)


def test_a_run_continues_on_another_number_of_gpus_and_under_another_stage(
    model: Path, graphs: GraphSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = samples(9)
    expected, trainer = on_cpu(graphs, run_file(model, **settings("nesterov", 0, 1, 1)), steps)
    state: dict[str, Array] | None = None
    curve = []
    for place, (ranks, zero) in enumerate(((2, 2), (3, 1), (1, 1))):
        spec = run_file(model, **settings("nesterov", zero, ranks, 1))
        fakes = [Fake(monkeypatch) for _ in range(ranks)]
        found = on_gpus(fakes, graphs, spec, steps[3 * place : 3 * place + 3], start=state)
        monkeypatch.undo()
        state = {name: whole(found, name) for name in found[0].state}
        curve += found[0].curve
    np.testing.assert_allclose([loss for loss, _ in curve], [each.loss for each in expected], 1e-5)
    assert state is not None
    for name, values in state_of(trainer).items():
        np.testing.assert_allclose(state[name], values, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("zero", "ranks", "micro"), [(0, 1, 1), (0, 2, 2), (1, 2, 1), (2, 2, 2)])
def test_state_on_the_host_gives_the_bits_of_state_on_the_gpu(
    model: Path, graphs: GraphSet, rule: str, zero: int, ranks: int, micro: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups_of, "__kwdefaults__", {"largest": 256})
    steps, found = samples(9, damaged=(3,)), []
    for offload in ("none", "optimizer"):
        spec = run_file(model, **settings(rule, zero, ranks, micro, train__offload=offload))
        fakes = [Fake(monkeypatch) for _ in range(ranks)]
        found.append(on_gpus(fakes, graphs, spec, steps, micro=micro))
    for here, there in zip(*found, strict=True):
        assert there.skipped == here.skipped == [3]
        np.testing.assert_array_equal(there.curve, here.curve)
        for name, values in here.state.items():
            np.testing.assert_array_equal(there.state[name], values, err_msg=name)
        kept = [name for name in here.state if name != "parameters"]
        assert there.memory["offloaded"] == here.memory["moments"] == sum(4 * here.state[name].size for name in kept)
        # The largest tensor has 1,088 elements, and LAMB's are never cut.
        assert there.memory["moments"] <= 3 * len(kept) * 4 * (1088 if rule == "lamb" else 256)
    (line,) = [line for line in found[1][0].log if "pinned host memory" in line]
    assert f"= {found[1][0].memory['offloaded']} bytes" in line
    pieces = [line for line in found[1][0].log if "of a piece is captured" in line]
    assert len(pieces) == 1, found[1][0].log


def test_pieces_cover_the_share_and_tensors_of_lamb_stay_whole() -> None:
    cuts = [Piece(64, 1216, 0.1, 0), Piece(1216, 1280, 0.0, 1), Piece(1280, 1408, 0.0, 2)]
    cut = groups_of(cuts, uncut=False, largest=512)
    assert [(each.start, each.stop, each.number) for (each,) in cut] == [
        (64, 576, 0), (576, 1088, 0), (1088, 1216, 0), (1216, 1280, 1), (1280, 1408, 2),
    ]  # fmt: skip
    assert groups_of(cuts, uncut=True, largest=512) == [cuts[:1], cuts[1:]]
    assert staging_of(cut, 2) == 3 * 512 * 2
    assert staging_of(groups_of(cuts, uncut=True, largest=512), 2) == 2 * 1152 * 2
    assert groups_of([], uncut=False) == []
    assert staging_of([], 2) == 0


def test_a_host_that_cannot_pin_is_reported(model: Path, graphs: GraphSet, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(monkeypatch)
    fake.library.failing["cudaHostAlloc"] = 2
    spec = run_file(model, **settings("adamw", 0, 1, 1, train__offload="optimizer"))
    with pytest.raises(UserError, match=r"train\.offload: .*pin 0\.0 GB"):
        on_gpus([fake], graphs, spec, samples(1))
