"""Ranks that run their stages by a schedule get the loss and the gradients of one rank with the whole model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
import stage_models
from graph_build_models import run_graph, save_model, value
from kernels import needs_kernels
from onnx import helper
from stage_models import Model, assert_same, opened
from stage_ranks import Rank, batches_for, expected, merged, prepare, run_mpi, run_threads
from thread_wire import on_threads

from ortflow.workflow.assembly.stages import Division, StageGraphs
from ortflow.workflow.comm import Communicator, Request
from ortflow.workflow.comm.solo import SoloCommunicator
from ortflow.workflow.device import Buffer
from ortflow.workflow.device.cpu import CpuDevice
from ortflow.workflow.errors import UserError
from ortflow.workflow.parallel.schedule import Kind
from ortflow.workflow.sessions.binding import Binding
from ortflow.workflow.sessions.session import Sessions
from ortflow.workflow.trainer import MicroBatch
from ortflow.workflow.trainer.buffer_pool import DeviceValue
from ortflow.workflow.trainer.stage_evaluation import StageEvaluation
from ortflow.workflow.trainer.stage_runner import AHEAD
from ortflow.workflow.trainer.stage_wire import Wire

pytestmark = pytest.mark.rotates

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
    *,
    kernels: bool = False,
    tolerance: float = 1e-6,
) -> None:
    assert_same(merged(made.stages, found), expected(model, batches, seeds, kernels=kernels), tolerance=tolerance)


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
    # Ours and ONNX Runtime's convolutions add up in different orders, which depend on the processor.
    check(model, made, found, batches, seeds, tolerance=5e-6)


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


def test_a_weight_that_a_stage_reads_without_a_gradient_adds_nothing(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    nodes = [
        helper.make_node("MatMul", ["x", "weight"], ["h"]),
        helper.make_node("Tanh", ["h"], ["t"]),
        helper.make_node("Greater", ["weight", "zero"], ["positive"]),
        helper.make_node("Cast", ["positive"], ["mask"], to=1),
        helper.make_node("MatMul", ["t", "mask"], ["masked"]),
        helper.make_node("MatMul", ["masked", "out"], ["y"]),
    ]
    shapes = {"weight": (6, 6), "out": (6, 3)}
    tensors = {name: random.normal(size=shape).astype("float32") for name, shape in shapes.items()}
    tensors["zero"] = np.zeros(1, np.float32)
    save_model(tmp_path / "m.onnx", nodes, [value("x", ["batch", 6])], [value("y", ["batch", 3])], tensors)
    model = opened(tmp_path / "m.onnx")
    made = model.divided(Division(2, cuts=[["t"]]), tmp_path)
    prepare(made, model)
    assert made.stages.holders()["weight"] == [0, 1]
    assert made.stages.holders(trained=True)["weight"] == [0]
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
    with pytest.raises(UserError, match=r"stages 1 and 0.*'mean'"):
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


class Posted:
    """The receives of a rank that have begun and that it has not waited for."""

    def __init__(self, pipeline: Communicator) -> None:
        self.now, self.most = set[int](), 0
        self._begin, self._count = pipeline.start_receive, itertools.count()
        pipeline.start_receive = self.start  # type: ignore[method-assign]

    def start(self, buffer: Buffer, source: int, tag: int = 0) -> Request:
        number, request = next(self._count), self._begin(buffer, source, tag)
        self.now.add(number)
        self.most = max(self.most, len(self.now))
        return Awaited(request, lambda: self.now.discard(number))


@dataclass
class Awaited:
    request: Request
    over: Callable[[], None]

    def wait(self) -> None:
        self.over()
        self.request.wait()


@pytest.mark.parametrize(("kind", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_receives_are_posted_before_the_passes_that_need_them(kind: Kind, chunks: int, tmp_path: Path) -> None:
    """From the second step on, when the shapes are known; a message is one value here."""
    _, made = divided("transformer", tmp_path, 2, chunks)
    assert all(len(stage.sends) == 1 for stage in made.stages.stages[:-1])
    batches, seeds = batches_for("transformer", [4] * 6), [1, 2, 3, 4, 5, 6]

    def program(pipeline: Communicator) -> list[int]:
        posted, most = Posted(pipeline), list[int]()
        rank = Rank.open(tmp_path, kind, pipeline, kernels=False, state=())
        for _ in range(2):
            posted.most = 0
            rank.step(batches, seeds)
            most.append(posted.most)
            assert not posted.now
        return most

    assert on_threads(2, program) == [[1, 1 + AHEAD]] * 2


@pytest.mark.parametrize("kernels", [False, pytest.param(True, marks=needs_kernels)])
@pytest.mark.parametrize(
    ("name", "kind", "ranks", "chunks"),
    [("transformer", "gpipe", 3, 1), ("convolutions", "1f1b", 3, 1), ("transformer", "interleaved", 2, 2)],
)
def test_real_ranks(name: str, kind: Kind, ranks: int, chunks: int, kernels: bool, tmp_path: Path) -> None:
    """Dropout included, whose masks are those of the undivided graph; threads would share ONNX Runtime's generator."""
    sizes = {"dropout": 0.2} if name == "transformer" else {}
    model, made = divided(name, tmp_path, ranks, chunks, **sizes)
    assert bool(made.stages.stages[1].dropouts) == bool(sizes)
    batches, seeds = batches_for(name, [4, 4, 3, 4]), [11, 22, 33, 44]
    found = run_mpi(tmp_path, kind, batches, seeds, model.source.roles.state, kernels=kernels)
    check(model, made, found, batches, seeds, kernels=kernels)


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
        values = {each.name: DeviceValue(device.allocate(24, np.float32), (4, 6)) for each in sends}
        wire.send(("forward", 0), sends, values, batch, 1)
        values = {each.name: DeviceValue(device.allocate(12, np.float32), (2, 6)) for each in sends}
        wire.send(("forward", 0), sends, values, batch, 1)

    with pytest.raises(UserError, match=r"\[2, 6\].*\[4, 6\]"):
        on_threads(2, program)


def test_a_value_for_the_next_stage_is_not_a_metric(tmp_path: Path) -> None:
    path = stage_models.skipping(tmp_path / "m.onnx")
    source = onnx.load(path)
    # As rewrites of ortflow's own name what they make.
    for node in source.graph.node:
        for names in (node.input, node.output):
            names[:] = ["ortflow.Identity.1" if name == "1.result" else name for name in names]
    onnx.save(source, path)
    made = opened(path).divided(Division(1, chunks=2, cuts=[["ortflow.Identity.1"]]), tmp_path)
    made.write()
    device = CpuDevice()
    sessions = Sessions(device, 1, "error", None)
    evaluation = StageEvaluation(made.stages, SoloCommunicator(), sessions, lambda session: Binding(session, device))
    assert evaluation.metrics == {"ortflow.loss_sum", "ortflow.loss_weight"}
