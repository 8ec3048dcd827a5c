"""Layers divided over fake GPUs: collectives in captured graphs. The curve is that of one CPU rank."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import stage_models
from emulated_cuda import from_bytes, to_bytes
from fake_cuda import fake_device
from graph_build_models import built, run_file
from onnx import TensorProto
from operators_on_cpu import needs_compilers, operators_here
from queued import Fake, outcomes_of
from test_queued_stages import Rank, alone, check, steps_of
from thread_links import LinkedNccl, StreamedCuda
from thread_wire import on_threads

from ortflow.workflow.comm import Communicator
from ortflow.workflow.comm.nccl import NcclCommunicator
from ortflow.workflow.comm.staged import StagedCommunicator
from ortflow.workflow.cuda.operators import Tensor
from ortflow.workflow.graph.domains import CUDA_DOMAIN
from ortflow.workflow.graph.forms import Form
from ortflow.workflow.graph.ir.collective import Kind, is_collective, kind_of
from ortflow.workflow.graph.memory.element_types import element_types
from ortflow.workflow.graph.types import GraphSet
from ortflow.workflow.sessions.gpu_collectives import serve
from ortflow.workflow.sessions.session import Sessions
from ortflow.workflow.spec.run import TrainerRunSpec
from ortflow.workflow.trainer import Report, divided_opening
from ortflow.workflow.trainer.check import divided_check
from ortflow.workflow.trainer.queued_work import QueuedWork
from ortflow.workflow.trainer.work import HostWork

pytestmark = [needs_compilers, pytest.mark.rotates]
HEADS = 2


LENGTHS = {"tokens": stage_models.TOKENS, "labels": stage_models.TOKENS}


def settings_of(parts: int, stages: int, replicas: int, *, sequence: bool = False, **more: Any) -> dict[str, Any]:
    parallel = {"horizontal": parts, "pipeline": stages, "sequence_parallel": sequence}
    return {
        "parallel": parallel, "resources__gpus_per_rank": 1,
        "resources__ranks_per_node": parts * stages * replicas, "train__gradient_accumulation": 4,
        "train__clip_norm": 0.5, "data__micro_batch": 8 // replicas,
        "train__optimizer": {"name": "adamw", "lr": 1e-2, "weight_decay": 0.1}, **more,
    }  # fmt: skip


def plain_forms(folder: Path) -> None:
    """Leave the graphs with standard operators: those of a GPU would need its compiler."""
    for path in folder.glob("part-*/*.onnx"):
        if len(path.suffixes) > 1 and path.suffixes[-2] in (".fused", ".half", ".placed"):
            path.unlink()


def train(
    root: Path, spec: TrainerRunSpec, count: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, staged: bool
) -> tuple[list[Rank], LinkedNccl]:
    library, grid, opens = LinkedNccl(), spec.grid, threading.Lock()
    fakes = [Fake(monkeypatch, StreamedCuda()) for _ in range(grid.world_size)]
    monkeypatch.setattr(divided_check, "has_passed", lambda key: False)
    opened = Sessions.open

    def open_alone(*given: Any, **named: Any) -> Any:
        # The library gives the next session the operators that were bound last.
        with opens:
            return opened(*given, **named)

    monkeypatch.setattr(Sessions, "open", open_alone)
    # The kernel that sums squares is not a fused one, which alone are emulated.
    monkeypatch.setattr(QueuedWork, "squares_graph", HostWork.squares_graph)
    operators = [operators_here(tmp_path, monkeypatch) for _ in fakes]

    def program(below: Communicator) -> Rank:
        fake, place = fakes[below.rank], grid.place(below.rank)
        library.here(fake.library)  # type: ignore[arg-type]
        world: Communicator = StagedCommunicator(below) if staged else NcclCommunicator(below, fake.device, library)
        sessions = Sessions(fake.device, 1, "error", fuse=False)
        sessions.operators = operators[below.rank]
        trainer = divided_opening.open_divided(
            GraphSet.load(root), spec, sessions, world, Report(note=fake.log.append), loop="queued"
        )
        steps = steps_of("transformer", count, place.data, grid.data)
        trainer.check(steps[0])
        outcomes = outcomes_of(trainer, steps)  # type: ignore[arg-type]
        evaluation = trainer.evaluate(steps[0], lambda: [1.0])
        trainer.before_save()
        state = {each: shard.part.read() for each, shard in trainer.state().items()}
        trainer.end_training()
        world.barrier()
        if not staged:
            world.close()
        assert fake.library.stuck == []  # type: ignore[attr-defined]
        return Rank(outcomes, evaluation, state, fake.log)

    return on_threads(grid.world_size, program), library


@pytest.mark.parametrize(
    ("parts", "stages", "replicas", "staged"),
    [(2, 1, 1, False), (2, 1, 1, True), (2, 1, 2, False), (2, 2, 1, False)],
)
def test_the_curve_is_that_of_one_rank(
    parts: int, stages: int, replicas: int, staged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = stage_models.transformer(tmp_path / "model.onnx")
    settings = settings_of(parts, stages, replicas)
    expected = alone(model, tmp_path, settings, "transformer", 6)
    graphs = built(model, **settings)
    plain_forms(graphs.root)
    found, library = train(graphs.root, run_file(model, **settings), 6, monkeypatch, tmp_path, staged=staged)
    check(found, expected)
    assert any("gradient checked" in line for line in found[0].log)
    if not staged:
        assert library.calls.count("ncclAllReduce") > 6 * 4 * 4
        passes = "a micro-batch" if stages == 1 else "the backward pass of a stage"
        assert any(f"{passes} is captured as a CUDA graph" in line for line in found[0].log)


# Without the samples' length, shares are filled with zeros wherever it might not be divisible.
@pytest.mark.parametrize(
    ("stages", "replicas", "staged", "lengths"),
    [(1, 1, False, LENGTHS), (1, 1, False, {}), (1, 1, True, LENGTHS), (1, 2, False, LENGTHS), (2, 1, False, LENGTHS)],
)
def test_shares_of_the_tokens_give_the_curve_of_one_rank(
    stages: int,
    replicas: int,
    staged: bool,
    lengths: dict[str, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = stage_models.transformer(tmp_path / "model.onnx")
    settings = settings_of(2, stages, replicas, sequence=True)
    expected = alone(model, tmp_path, settings, "transformer", 6)
    graphs = built(model, lengths=lengths, **settings)
    plain_forms(graphs.root)
    found, library = train(graphs.root, run_file(model, **settings), 6, monkeypatch, tmp_path, staged=staged)
    check(found, expected)
    if not staged:
        for name in ("ncclReduceScatter", "ncclAllGather"):
            assert library.calls.count(name) > 6 * 4 * 4
        passes = "a micro-batch" if stages == 1 else "the backward pass of a stage"
        assert any(f"{passes} is captured as a CUDA graph" in line for line in found[0].log)


@pytest.mark.parametrize("form", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stages", [1, 2])
def test_shares_of_the_tokens_are_fused_like_whole_values(form: str, stages: int, tmp_path: Path) -> None:
    model = stage_models.transformer(tmp_path / "model.onnx", width=128, vocabulary=130)
    operators, exchanged = [], Counter[tuple[Kind, int]]()
    for sequence in (False, True):
        settings = settings_of(2, stages, 1, sequence=sequence, train__precision=form)
        folder = built(model, lengths=LENGTHS, **settings).root / "part-0"
        found = Counter[str]()
        for path in folder.glob("*.onnx"):
            in_half = "half" in path.name
            if (in_half if form != "fp32" else ".fused." in path.name) and (stages == 1 or "ward" in path.name):
                graph = onnx.load(path)
                found.update(node.op_type for node in graph.graph.node)
                types = element_types(graph)
                if sequence:
                    nodes = filter(is_collective, graph.graph.node)
                    exchanged.update((kind_of(node), types[node.input[0]]) for node in nodes)
        operators.append(found)
    whole, shares = operators
    ours = ["LayerNormalization", "LayerNormalizationGrad", "Fused", "FusedSums", "ColumnSums", "Product", "Attention"]
    assert {name: shares[name] for name in ours} == {name: whole[name] for name in ours}
    assert shares["LayerNormalization"] == shares["LayerNormalizationGrad"] == 9
    # No size is computed by the host, and no row is added or taken off.
    for name in ("NonZero", "Shape", "Pad"):
        assert shares[name] <= whole[name] + 2, name
    half = {"fp32": TensorProto.FLOAT, "bf16": TensorProto.BFLOAT16, "fp16": TensorProto.FLOAT16}[form]
    kinds = {kind: {each: n for (k, each), n in exchanged.items() if k == kind} for kind in Kind}
    # Each of the 8 divided layers and the head: forward, backward, and again for the gradient of the weight.
    gathered, scattered = kinds[Kind.ALL_GATHER], kinds[Kind.REDUCE_SCATTER]
    assert sum(gathered.values()) == 9 + 9 + 9
    assert sum(scattered.values()) == 9 + 9
    # Sums of what no product has made, such as rows that were looked up, are in fp32.
    assert scattered[half] >= 9 + 8
    assert gathered[half] >= 9 + 9 + 8


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_parts_run_the_same_collectives_in_every_form(precision: str, tmp_path: Path) -> None:
    model = stage_models.transformer(tmp_path / "model.onnx", width=128, vocabulary=130)
    graphs = built(model, train__precision=precision, **settings_of(2, 1, 1))
    kinds = []
    for part in range(2):
        for path in sorted((graphs.root / f"part-{part}").glob("*.onnx")):
            nodes = [node for node in onnx.load(path).graph.node if is_collective(node)]
            assert {node.domain for node in nodes} <= {CUDA_DOMAIN}
            assert Kind.COPY not in [kind_of(node) for node in nodes]
            kinds.append((path.name, [kind_of(node) for node in nodes]))
    half = len(kinds) // 2
    assert kinds[:half] == kinds[half:]
    train_onnx = Path("train.onnx")
    named = dict(kinds)
    assert (
        named[Form.FUSED.of(train_onnx).name].count(Kind.ALL_REDUCE) == named["train.onnx"].count(Kind.ALL_REDUCE) >= 16
    )
    assert (Form.HALF.of(train_onnx).name in named) == (precision == "bf16")
    fused = onnx.load(graphs.root / "part-0" / Form.FUSED.of(train_onnx))
    operators = {node.op_type for node in fused.graph.node if node.domain == CUDA_DOMAIN}
    assert {"LayerNormalization", "Fused", "Collective"} <= operators
    if precision == "bf16":
        half = onnx.load(graphs.root / "part-0" / Form.HALF.of(train_onnx))
        operators = {node.op_type for node in half.graph.node}
        assert {"CrossEntropyShare", "CrossEntropyGrad"} <= operators
        assert not operators & {"SharedCrossEntropy", "ReduceMax", "GatherElements", "ScatterElements"}
        types = element_types(half)
        summed = [types[n.input[0]] for n in half.graph.node if is_collective(n) and kind_of(n) == Kind.ALL_REDUCE]
        # Look-up, and two of the loss's sums of one number for each row.
        assert summed.count(TensorProto.FLOAT) == 3
        assert summed.count(TensorProto.BFLOAT16) == len(summed) - 3


def test_a_maximum_and_rows_are_exchanged(tmp_path: Path) -> None:
    library = LinkedNccl()

    def program(below: Communicator) -> None:
        device = fake_device(library.here(StreamedCuda()))
        world = NcclCommunicator(below, device, library)
        mine, rows, shared = (device.allocate(count, np.float32) for count in (4, 8, 2))
        mine.write(np.arange(4, dtype=np.float32) * (1 - 2 * world.rank))
        world.collect(Kind.ALL_REDUCE_MAX, mine, mine)
        np.testing.assert_array_equal(mine.read(), np.arange(4))
        world.collect(Kind.ALL_GATHER, mine, rows)
        np.testing.assert_array_equal(rows.read(), [*range(4), *range(4)])
        world.collect(Kind.REDUCE_SCATTER, mine, shared)
        np.testing.assert_array_equal(shared.read(), np.arange(4)[2 * world.rank : 2 * world.rank + 2] * 2)
        world.close()

    on_threads(2, program)


@pytest.mark.parametrize("through", ["nccl", "host"])
@pytest.mark.parametrize("kind", [TensorProto.BFLOAT16, TensorProto.FLOAT16, TensorProto.FLOAT])
def test_halves_are_summed_and_gathered(kind: int, through: str) -> None:
    library = LinkedNccl()
    given = np.array([[1.5, -2.0, 0.25, 100.0], [2.0, 0.5, -0.25, 3.0]], np.float32)

    def program(below: Communicator) -> None:
        device = fake_device(library.here(StreamedCuda()))
        nccl = through == "nccl"
        world: Communicator = NcclCommunicator(below, device, library) if nccl else StagedCommunicator(below)
        operators = SimpleNamespace(on_collective=None)
        serve(operators, device, {0: world})  # type: ignore[arg-type]
        content = to_bytes(given[world.rank], kind)
        source, target = (device.allocate(content.size, np.uint8) for _ in range(2))
        source.write(content)
        tensor = Tensor(source.pointer, (2, 2), kind)
        operators.on_collective(Kind.ALL_REDUCE, 0, 2, tensor, target.pointer)
        np.testing.assert_array_equal(from_bytes(target.read(), kind, (4,)), given.sum(axis=0))
        mine, rows = (device.allocate(size, np.uint8) for size in (content.size // 2, content.size * 2))
        operators.on_collective(Kind.REDUCE_SCATTER, 0, 2, tensor, mine.pointer)
        half = slice(2 * world.rank, 2 * world.rank + 2)
        np.testing.assert_array_equal(from_bytes(mine.read(), kind, (2,)), given.sum(axis=0)[half])
        operators.on_collective(Kind.ALL_GATHER, 0, 2, tensor, rows.pointer)
        np.testing.assert_array_equal(from_bytes(rows.read(), kind, (8,)), given.reshape(-1))
        world.barrier()
        if nccl:
            world.close()

    on_threads(2, program)
