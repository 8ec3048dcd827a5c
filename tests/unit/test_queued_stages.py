"""Pipelines on fake GPUs: ranks are threads, messages go through a fake NCCL. The curve is that of one CPU rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import stage_models
from graph_build_models import Array, built, run_file
from queued import Fake, halved, outcomes_of
from stage_models import batch_of
from thread_links import LinkedNccl, StreamedCuda
from thread_wire import on_threads
from trainers import trainer_on, write_update

from ortflow.workflow.comm import Communicator
from ortflow.workflow.comm.nccl import NcclCommunicator
from ortflow.workflow.comm.staged import StagedCommunicator
from ortflow.workflow.graph.types import GraphSet
from ortflow.workflow.parallel.stage import StageSet
from ortflow.workflow.sessions.session import Sessions
from ortflow.workflow.spec.run import TrainerRunSpec
from ortflow.workflow.trainer import (
    EvaluationOutcome,
    MicroBatch,
    Report,
    StepOutcome,
    divided_opening,
    queued_work,
)
from ortflow.workflow.trainer.check import divided_check
from ortflow.workflow.trainer.loss_scale import LARGEST, LossScale
from ortflow.workflow.trainer.stage_wire import Wire

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"name": "adamw", "lr": 1e-2, "weight_decay": 0.1},
    "lamb": {"name": "lamb", "lr": 1e-2, "weight_decay": 0.1},
}
MICRO = 4
LAYOUTS: list[tuple[str, int, int, int]] = [
    ("1f1b", 2, 1, 1), ("gpipe", 2, 1, 1), ("interleaved", 2, 2, 1), ("1f1b", 3, 1, 1), ("1f1b", 2, 1, 2),
]  # fmt: skip
"""Schedule, stages, chunks, replicas."""


def changes(
    schedule: str, stages: int, chunks: int, replicas: int, optimizer: str = "adamw", **more: Any
) -> dict[str, Any]:
    parallel = {"pipeline": stages, "schedule": schedule, **({"chunks": chunks} if chunks > 1 else {})}
    return {
        "parallel": {**parallel, **more.pop("parallel", {})},
        "resources__ranks_per_node": stages * replicas, "resources__kernels": "onnxruntime",
        "train__gradient_accumulation": MICRO, "train__clip_norm": 0.5, "data__micro_batch": 8 // replicas,
        "train__optimizer": OPTIMIZERS[optimizer], **more,
    }  # fmt: skip


def steps_of(
    name: str, count: int, replica: int = 0, replicas: int = 1, damaged: int = -1, sizes: Sequence[Sequence[int]] = ()
) -> list[list[MicroBatch]]:
    """Micro-batches of a replica; all replicas together have the same samples.

    `sizes` are those of each step's micro-batches, by default MICRO of 8 samples.
    """
    found = []
    for step in range(count):
        batches = []
        for micro in range(MICRO):
            samples = sizes[step][micro] if sizes else 8
            arrays, size = batch_of(name, 100 * step + micro, samples or 8), samples // replicas
            if step == damaged and micro == MICRO - 1:
                arrays["x"][-1, 0] = np.nan
            mine = {each: array[replica * size : (replica + 1) * size] for each, array in arrays.items()}
            batches.append(MicroBatch(mine, size))
        found.append(batches)
    return found


class Rank:
    """What a rank has after its steps."""

    def __init__(
        self,
        outcomes: list[StepOutcome],
        evaluation: EvaluationOutcome,
        state: dict[str, Array],
        log: list[str],
        calls: Sequence[str] = (),
    ) -> None:
        self.outcomes, self.evaluation, self.state, self.log = outcomes, evaluation, state, log
        self.calls = calls
        """Of CUDA, in the last step."""


def train(
    graphs: GraphSet, spec: TrainerRunSpec, name: str, count: int, monkeypatch: pytest.MonkeyPatch, **more: Any
) -> tuple[list[Rank], LinkedNccl]:
    """Steps and an evaluation on as many fake GPUs as the run file asks for."""
    library, grid, staged = LinkedNccl(), spec.grid, more.pop("staged", False)
    fakes = [Fake(monkeypatch, StreamedCuda()) for _ in range(grid.world_size)]
    monkeypatch.setattr(divided_check, "has_passed", lambda key: False)

    def program(below: Communicator) -> Rank:
        fake, place = fakes[below.rank], grid.place(below.rank)
        library.here(fake.library)  # type: ignore[arg-type]
        world: Communicator = StagedCommunicator(below) if staged else NcclCommunicator(below, fake.device, library)
        sessions = Sessions(fake.device, 1, "error", fuse=False)
        trainer = divided_opening.open_divided(
            graphs, spec, sessions, world, Report(note=fake.log.append), loop="queued"
        )
        steps = steps_of(name, count, place.data, grid.data, **more)
        trainer.check(steps[0])
        outcomes = outcomes_of(trainer, steps[:-1])  # type: ignore[arg-type]
        before = len(fake.library.calls)
        outcomes += outcomes_of(trainer, steps[-1:], sum(each.skipped is None for each in outcomes))  # type: ignore[arg-type]
        calls = [name for name, _ in fake.library.calls[before:]]
        evaluation = trainer.evaluate(steps[0], lambda: [1.0])
        trainer.before_save()
        state = {each: shard.part.read() for each, shard in trainer.state().items()}
        trainer.end_training()
        world.barrier()
        if not staged:
            world.close()
        assert fake.library.stuck == []  # type: ignore[attr-defined]
        return Rank(outcomes, evaluation, state, fake.log, calls)

    return on_threads(grid.world_size, program), library


def alone(
    model: Path, folder: Path, settings: dict[str, Any], name: str, count: int, **more: Any
) -> tuple[list[StepOutcome], EvaluationOutcome, dict[str, Array]]:
    """One CPU rank with the same samples."""
    kept = {key: settings[key] for key in settings if key.startswith("train")}
    kept |= {"data__micro_batch": 8, "resources__kernels": "onnxruntime"}
    graphs, spec = built(model, **kept), run_file(model, **kept)
    write_update(graphs, spec)
    trainer = trainer_on(graphs, spec)
    steps = steps_of(name, count, **more)
    outcomes = outcomes_of(trainer, steps)
    evaluation = trainer.evaluate(steps[0], lambda: [1.0])
    return outcomes, evaluation, {each: buffer.read() for each, buffer in trainer.state().items()}  # type: ignore[union-attr]


def check(ranks: list[Rank], expected: tuple[list[StepOutcome], EvaluationOutcome, dict[str, Array]]) -> None:
    outcomes, evaluation, state = expected
    for rank in ranks:
        for mine, theirs in zip(rank.outcomes, outcomes, strict=True):
            assert (mine.skipped is None) == (theirs.skipped is None)
            assert mine.samples == theirs.samples
            if theirs.skipped is None:
                np.testing.assert_allclose([mine.loss, mine.grad_norm], [theirs.loss, theirs.grad_norm], rtol=1e-5)
        assert rank.evaluation.metrics["loss"] == pytest.approx(evaluation.metrics["loss"], rel=1e-5)
    for name, values in state.items():
        found = np.concatenate([rank.state[name] for rank in ranks])
        np.testing.assert_allclose(found, values, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.rotates
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_curve_is_that_of_one_rank(
    layout: tuple[str, int, int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = stage_models.transformer(tmp_path / "model.onnx")
    settings = changes(*layout)
    expected = alone(model, tmp_path, settings, "transformer", 7)
    graphs = built(model, **settings)
    found, library = train(graphs, run_file(model, **settings), "transformer", 7, monkeypatch)
    check(found, expected)
    assert library.sent > 7 * MICRO, "activations and gradients go through NCCL"
    assert any("the update is captured as a CUDA graph" in line for line in found[0].log)
    assert any("gradient checked" in line for line in found[0].log)
    stages = layout[1]
    for number, rank in enumerate(found):
        # Of two replicas, the ranks of a stage are neighbours.
        stage, replica = divmod(number, layout[3])
        last = stage == stages - 1 and layout[0] != "gpipe"
        # With two chunks, only the last one's passes run one behind the other.
        captured = {"both passes"} if last else {"the forward pass", "the backward pass"}
        captured |= {"the forward pass", "the backward pass"} if layout[2] > 1 else set()
        said = {line.split(" of a stage")[0] for line in rank.log if "of a stage is captured" in line}
        assert replica or said == captured
        passes = MICRO * layout[2] * (1 if last else 2) + (MICRO if last and layout[2] > 1 else 0)
        assert rank.calls.count("cudaGraphLaunch") == passes + 2 + (not replica), "with norm, scaling and update"
        assert "cudaStreamSynchronize" not in rank.calls, "the host waits for nothing but the loss"


def test_steps_of_other_sizes_between_those_that_are_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = stage_models.skipping(tmp_path / "model.onnx")
    settings = changes("1f1b", 2, 1, 1, train__check_gradient=False)
    usual, small, short, none = [8] * MICRO, [4] * MICRO, [8, 8, 8, 0], [0] * MICRO
    sizes = [usual] * 5 + [short, usual, [8, 8, 8, 4], usual, small, small, small, small, usual, none, usual, usual]
    expected = alone(model, tmp_path, settings, "skipping", len(sizes), sizes=sizes)
    graphs = built(model, **settings)
    found, _ = train(graphs, run_file(model, **settings), "skipping", len(sizes), monkeypatch, sizes=sizes)
    check(found, expected)


def test_messages_of_the_first_step_of_each_shape_pass_through_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message that waits on the GPU holds up what loads a kernel."""
    said: dict[int, list[bool]] = defaultdict(list)
    plain = Wire.pass_through_host

    def noted(wire: Wire, *, through: bool) -> None:
        said[id(wire)].append(through)
        plain(wire, through=through)

    monkeypatch.setattr(Wire, "pass_through_host", noted)
    model = stage_models.skipping(tmp_path / "model.onnx")
    settings = changes("1f1b", 2, 1, 1, train__check_gradient=False)
    sizes = [[8] * MICRO, [8] * MICRO, [8, 8, 8, 0], [8, 8, 8, 8], [8, 8, 8, 4], [8, 8, 8, 4]]
    graphs, spec = built(model, **settings), run_file(model, **settings)
    _, library = train(graphs, spec, "skipping", len(sizes), monkeypatch, sizes=sizes)
    assert list(said.values()) == [[True, False, True, False, True, False]] * 2
    before = library.sent
    _, library = train(graphs, spec, "skipping", 1, monkeypatch)
    assert library.sent < before - 2 * MICRO, "a single step sends nothing between passes through NCCL"


def test_passes_are_captured_anew_when_more_activations_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = stage_models.skipping(tmp_path / "model.onnx")
    settings = changes("gpipe", 2, 1, 1, train__check_gradient=False)
    all_sizes = [[8, 8, 0, 0]] * 5 + [[8] * MICRO] * 4
    expected = alone(model, tmp_path, settings, "skipping", len(all_sizes), sizes=all_sizes)
    graphs, spec = built(model, **settings), run_file(model, **settings)
    for count, launched in ((1, 2), (2, 0), (3, MICRO), (4, 2 * MICRO)):
        sizes = all_sizes[: 5 + count]
        found, _ = train(graphs, spec, "skipping", len(sizes), monkeypatch, sizes=sizes)
        calls = found[0].calls.count("cudaGraphLaunch")
        assert calls == launched + 3, "two forward passes come before memory is taken"
    check(found, expected)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_sums_and_norms_on_ranks_that_share_a_gpu(
    optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = stage_models.skipping(tmp_path / "model.onnx")
    settings = changes("1f1b", 2, 1, 2, optimizer, parallel={"zero": 1})
    expected = alone(model, tmp_path, settings, "skipping", 6, damaged=3)
    assert [each.skipped is None for each in expected[0]] == [True, True, True, False, True, True]
    graphs = built(model, **settings)
    found, library = train(graphs, run_file(model, **settings), "skipping", 6, monkeypatch, staged=True, damaged=3)
    check(found, expected)
    assert not library.sent


@pytest.mark.rotates
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_without_a_usable_gradient_leaves_nothing_to_the_next(
    layout: tuple[str, int, int, int], optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = stage_models.skipping(tmp_path / "model.onnx")
    settings = changes(*layout, optimizer, train__check_gradient=False)
    expected = alone(model, tmp_path, settings, "skipping", 7, damaged=3)
    assert [each.skipped is None for each in expected[0]] == [True, True, True, False, True, True, True]
    graphs = built(model, **settings)
    found, _ = train(graphs, run_file(model, **settings), "skipping", 7, monkeypatch, damaged=3)
    check(found, expected)


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout[0] != "gpipe"], ids=str)
def test_an_overflow_of_the_last_stage_is_skipped_by_all(
    layout: tuple[str, int, int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = stage_models.skipping(tmp_path / "model.onnx")
    settings = changes(*layout, train__check_gradient=False)
    expected = alone(model, tmp_path, settings, "skipping", 12)
    graphs = built(model, **settings)
    stages = StageSet.load(graphs.root / "part-0")
    # Its gradients, those that it sends back included, are multiplied by the scale and rounded to fp16.
    path = stages.both(layout[1] * layout[2] - 1)
    onnx.save(halved(onnx.load(path)), path)
    monkeypatch.setattr(queued_work, "loss_scale_of", lambda asked: LossScale(LARGEST))
    found, _ = train(graphs, run_file(model, **settings), "skipping", 12, monkeypatch)
    for rank in found[1:]:
        assert [each.overflow for each in rank.outcomes] == [each.overflow for each in found[0].outcomes]
        assert [each.skipped for each in rank.outcomes] == [each.skipped for each in found[0].outcomes]
    kept = [each for each in found[0].outcomes if each.skipped is None]
    assert len(kept) < 12, "the first scale overflows"
    assert kept
    for mine, theirs in zip(kept[:1], expected[0], strict=False):
        # The first update is that of the first batch, whenever it happens.
        assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=0.5)
    assert all(np.isfinite(array).all() for rank in found for array in rank.state.values())
