"""Ranks that run their stages by a schedule get the loss and the gradients of one rank with the whole model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import stage_models
from graph_build_models import run_graph
from kernels import needs_kernels
from stage_models import Model, assert_same, opened
from stage_ranks import Rank, batches_for, expected, merged, prepare, run_mpi, run_threads
from thread_wire import on_threads

from ortflow.workflow.assembly.stages import Division, StageGraphs
from ortflow.workflow.comm import Communicator
from ortflow.workflow.device.cpu import CpuDevice
from ortflow.workflow.errors import UserError
from ortflow.workflow.parallel.schedule import Kind
from ortflow.workflow.trainer import MicroBatch
from ortflow.workflow.trainer.stage_wire import Held, Wire

LAYOUTS: list[tuple[Kind, int, int]] = [
    ("gpipe", 2, 1), ("gpipe", 4, 1), ("1f1b", 2, 1), ("1f1b", 3, 1), ("1f1b", 4, 1), ("interleaved", 2, 2),
]  # fmt: skip


def divided(
    name: str, path: Path, ranks: int, chunks: int = 1, cuts: Sequence[Sequence[str]] | None = None, **sizes: float
) -> tuple[Model, StageGraphs]:
    """A model and its stages, on disk."""
    model = opened(getattr(stage_models, name)(path / "m.onnx", **sizes))
    made = model.divided(Division(ranks, chunks, cuts, rows=4, length=16), path)
    prepare(made, model)
    return model, made


def check(
    model: Model,
    made: StageGraphs,
    found: list[dict[str, np.ndarray]],
    batches: Sequence[MicroBatch],
    seeds: Sequence[int],
) -> None:
    assert_same(merged(made.stages, found), expected(model, batches, seeds))


@pytest.mark.parametrize("name", ["transformer", "convolutions", "skipping"])
@pytest.mark.parametrize(("kind", "ranks", "chunks"), LAYOUTS)
def test_a_step_is_that_of_one_rank(kind: Kind, ranks: int, chunks: int, name: str, tmp_path: Path) -> None:
    model, made = divided(name, tmp_path, ranks, chunks)
    batches, seeds = batches_for(name, [4, 4, 4, 4]), [1, 2, 3, 4]
    state = model.source.roles.state
    check(model, made, run_threads(tmp_path, kind, batches, seeds, state=state), batches, seeds)


@needs_kernels
@pytest.mark.parametrize("name", ["transformer", "convolutions"])
def test_own_kernels_serve_stages(name: str, tmp_path: Path) -> None:
    model, made = divided(name, tmp_path, 3)
    batches, seeds = batches_for(name, [4, 4, 4]), [1, 2, 3]
    found = run_threads(tmp_path, "1f1b", batches, seeds, kernels=True, state=model.source.roles.state)
    check(model, made, found, batches, seeds)


@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "interleaved"])
def test_micro_batches_of_several_sizes_and_of_none(kind: Kind, tmp_path: Path) -> None:
    model, made = divided("transformer", tmp_path, 2, 2 if kind == "interleaved" else 1)
    batches, seeds = batches_for("transformer", [4, 0, 2, 4, 3, 2]), [1, 2, 3, 4, 5, 6]
    check(model, made, run_threads(tmp_path, kind, batches, seeds, steps=2), batches, seeds)


def test_a_step_of_no_sample_has_no_gradient(tmp_path: Path) -> None:
    divided("skipping", tmp_path, 2)
    found = run_threads(tmp_path, "1f1b", batches_for("skipping", [0, 0]), [1, 2])
    assert all(not array.any() for each in found for array in each.values())


def test_gradients_are_bitwise_the_same_again(tmp_path: Path) -> None:
    divided("transformer", tmp_path, 3)
    batches, seeds = batches_for("transformer", [4] * 5), [1, 2, 3, 4, 5]
    first, second = (run_threads(tmp_path, "1f1b", batches, seeds) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        for name, array in one.items():
            np.testing.assert_array_equal(other[name], array)


def test_a_weight_of_two_chunks_of_one_rank_gets_both_gradients(tmp_path: Path) -> None:
    # The embedding is read by stage 0 and stage 2, both of rank 0.
    cuts = [["h.0.output"], ["h.3.output"], ["logits"]]
    model, made = divided("transformer", tmp_path, 2, 2, cuts)
    assert made.stages.holders()["wte.weight"] == [0]
    assert [stage.number for stage in made.stages.stages if "wte.weight" in stage.trained] == [0, 2]
    batches, seeds = batches_for("transformer", [4, 4, 4, 4]), [1, 2, 3, 4]
    check(model, made, run_threads(tmp_path, "interleaved", batches, seeds, steps=2), batches, seeds)


def test_a_stage_without_parameters(tmp_path: Path) -> None:
    model, made = divided("skipping", tmp_path, 3, cuts=[["0.product"], ["0.result"]])
    assert made.stages.tensors_of(1) == []
    batches, seeds = batches_for("skipping", [4, 4]), [1, 2]
    check(model, made, run_threads(tmp_path, "1f1b", batches, seeds), batches, seeds)


def test_stages_in_front_of_all_that_is_trained_have_no_backward_pass(tmp_path: Path) -> None:
    path = stage_models.skipping(tmp_path / "m.onnx")
    frozen = ["0.weight", "1.weight"]
    model = opened(path, model__parameters={"freeze": frozen})
    made = model.divided(Division(3, cuts=[["1.result"], ["2.sum"]]), tmp_path)
    prepare(made, model)
    assert not made.stages.backward(0).exists()
    assert not any(each.gradient for each in made.stages.stages[1].receives)
    batches, seeds = batches_for("skipping", [4, 4]), [1, 2]
    check(model, made, run_threads(tmp_path, "1f1b", batches, seeds), batches, seeds)


def test_a_backward_pass_reads_the_statistics_of_its_forward_pass(tmp_path: Path) -> None:
    # With GPipe, the statistics have moved on three times before the first backward pass.
    model, made = divided("reading_statistics", tmp_path, 2, cuts=[["z"]])
    batches, seeds = batches_for("reading_statistics", [4, 4, 4]), [1, 2, 3]
    found = run_threads(tmp_path, "gpipe", batches, seeds, state=model.source.roles.state)
    check(model, made, found, batches, seeds)


def test_statistics_of_two_stages_are_refused(tmp_path: Path) -> None:
    model = opened(stage_models.reading_statistics(tmp_path / "m.onnx"))
    with pytest.raises(UserError, match="stages 1 and 0 both use the running statistic 'mean'"):
        model.divided(Division(2, cuts=[["n"]]), tmp_path)


def test_evaluation_on_ranks(tmp_path: Path) -> None:
    model, _ = divided("transformer", tmp_path, 2, 2)
    batches = batches_for("transformer", [4, 3, 4])

    def program(pipeline: Communicator) -> list[dict[str, np.ndarray]]:
        return Rank.open(tmp_path, "interleaved", pipeline, kernels=False, state=()).evaluate(batches)

    last = on_threads(2, program)[-1]
    for batch, found in zip(batches, last, strict=True):
        whole = run_graph(model.evaluate, {**model.source.tensors, **batch.arrays})
        for name, array in found.items():
            np.testing.assert_allclose(array, whole[name], rtol=1e-6)
        assert "ortflow.loss_sum" in found


@pytest.mark.parametrize(
    ("name", "kind", "ranks", "chunks"),
    [("transformer", "gpipe", 3, 1), ("convolutions", "1f1b", 3, 1), ("transformer", "interleaved", 2, 2)],
)
def test_real_ranks(name: str, kind: Kind, ranks: int, chunks: int, tmp_path: Path) -> None:
    """Dropout included, whose masks are those of the undivided graph; threads would share their generator."""
    sizes = {"dropout": 0.2} if name == "transformer" else {}
    model, made = divided(name, tmp_path, ranks, chunks, **sizes)
    assert bool(made.stages.stages[1].dropouts) == bool(sizes)
    batches, seeds = batches_for(name, [4, 4, 3, 4]), [11, 22, 33, 44]
    found = run_mpi(tmp_path, kind, batches, seeds, model.source.roles.state)
    check(model, made, found, batches, seeds)


def test_a_shape_that_depends_on_the_numbers_is_refused(tmp_path: Path) -> None:
    _, made = divided("skipping", tmp_path, 2)
    sends = made.stages.stages[0].sends
    batch = batches_for("skipping", [4])[0]

    def program(pipeline: Communicator) -> None:
        device = CpuDevice()
        wire = Wire(pipeline, device, 2)
        if pipeline.rank:
            wire.receive(("forward", 0), sends, batch, 0).wait()
            return
        values = {each.name: Held(device.allocate(24, np.float32), (4, 6)) for each in sends}
        wire.send(("forward", 0), sends, values, batch, 1)
        values = {each.name: Held(device.allocate(12, np.float32), (2, 6)) for each in sends}
        wire.send(("forward", 0), sends, values, batch, 1)

    with pytest.raises(UserError, match=r"has the shape \[2, 6\], and \[4, 6\] in another batch"):
        on_threads(2, program)
