"""The trainer of divided models on real ranks: its state in canonical form, and the check of its gradient."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import onnx
import pytest
import stage_models
from graph_build_models import built, residual, run_file, save_model, value
from kernels import needs_kernels
from messages import alike
from onnx import helper, numpy_helper
from project import FEW_CORES
from real_ranks import all_good

from ortflow.workflow.assembly.divide import check_alike
from ortflow.workflow.comm.solo import SoloCommunicator
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.ir.collective import Kind
from ortflow.workflow.graph.types import GraphSet
from ortflow.workflow.layout import FlatIndex, Tensor, share
from ortflow.workflow.parallel.grid import Place
from ortflow.workflow.run.graph_hashes import damage, hashes_of
from ortflow.workflow.run.recorded_environment import breaking, differences
from ortflow.workflow.trainer import MicroBatch
from ortflow.workflow.trainer.canonical import Exchange
from ortflow.workflow.trainer.check.divided_checker import DividedChecker
from ortflow.workflow.trainer.divided_opening import division_of
from ortflow.workflow.trainer.fingerprint import fingerprint_of

pytestmark = needs_kernels
LAYOUTS: dict[int, list[dict[str, Any]]] = {
    2: [{"pipeline": 2}, {"horizontal": 2}],
    4: [
        {"pipeline": 4}, {"pipeline": 2, "zero": 1}, {"horizontal": 2, "zero": 2},
        {"pipeline": 2, "horizontal": 2}, {"pipeline": 2, "chunks": 2, "schedule": "interleaved"},
    ],
}  # fmt: skip

PROGRAM = """
import json, sys
from pathlib import Path
import numpy as np
from ortflow.workflow.comm.mpi import MpiCommunicator
from ortflow.workflow.device.cpu import CpuDevice
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.types import GraphSet
from ortflow.workflow.kernels.library import library_for
from ortflow.workflow.sessions.session import Sessions
from ortflow.workflow.spec.run import TrainerRunSpec
from ortflow.workflow.trainer import MicroBatch, Report
from ortflow.workflow.trainer.check import divided_checker
from ortflow.workflow.trainer.check.divided_check import DividedCheck
from ortflow.workflow.trainer.divided_opening import open_divided

world = MpiCommunicator()
for folder in sys.argv[1:]:
    spec = TrainerRunSpec.model_validate_json(Path(folder, "spec.json").read_text())
    graphs = GraphSet.load(Path(folder, "graphs"))
    notes = []
    trainer = open_divided(
        graphs, spec, Sessions(CpuDevice(), 1, "error", library_for("auto").path), world,
        Report(note=notes.append),
    )
    trainer.before_save()
    trainer.before_export()
    if world.rank:
        trainer.lend()
    else:
        from safetensors.numpy import load_file
        for name, tensor in load_file(graphs.initial).items():
            assert trainer.exporter.lent[name].shape == tensor.shape, name
            assert np.array_equal(trainer.exporter.lent[name], tensor), name
        trainer.after_export()
    # What any other layout may have saved.
    whole = {}
    for number, (name, shard) in enumerate(sorted(trainer.state().items())):
        random = np.random.default_rng(number)
        values = np.zeros(shard.count, np.float32)
        for entry in graphs.index:
            if entry.end <= shard.count:
                values[entry.offset : entry.end] = random.normal(size=entry.tensor.count)
        whole[name] = values
        shard.part.write(values[shard.start : shard.stop])
    trainer.after_load()
    for shard in trainer.state().values():
        shard.part.fill(np.nan if shard.count % 64 else 0)
    trainer.before_save()
    for name, shard in trainer.state().items():
        assert np.array_equal(shard.part.array, whole[name][shard.start : shard.stop]), (folder, name)

    random = np.random.default_rng(5)
    batch = MicroBatch({"x": random.normal(size=(8, 6)).astype("float32"), "labels": random.integers(0, 3, 8)}, 8)
    for shard in trainer.state().values():
        shard.part.array[:] *= 0.3
    trainer.after_load()
    before = {name: each.part.read() for name, each in trainer.state().items()}
    trainer.check([batch])
    assert world.rank or any("gradient checked" in note for note in notes), notes
    trainer.before_save()
    for name, each in trainer.state().items():
        assert np.array_equal(each.part.array, before[name]), "the check changed the state"
    place = spec.grid.place(world.rank)

    # A loss that bends where the first group is moved to: both of its differences are off alike.
    class Bent(DividedCheck):
        def __init__(self, part, *given):
            super().__init__(part, *given)
            honest, bends = part.gradient_of, iter([0.0, 1.0, -1.0, 0.5, -0.5])

            def bent(batch, seed):
                loss, gradients = honest(batch, seed)
                return loss + next(bends, 0.0), gradients

            part.gradient_of = bent

    divided_checker.DividedCheck = Bent
    import ortflow.workflow.trainer.check.divided_check as checking
    checking.VERSION += 1  # or it would remember that it has passed
    trainer.check([batch])

    class Wrong(DividedCheck):
        def __init__(self, part, *given):
            super().__init__(part, *given)
            honest = part.gradient_of

            def wrong(batch, seed):
                loss, gradients = honest(batch, seed)
                if (place.stage, place.part) == (0, 0):
                    gradients.write(1.5 * gradients.read())
                return loss, gradients

            part.gradient_of = wrong

    divided_checker.DividedCheck = Wrong
    checking.VERSION += 1
    try:
        trainer.check([batch])
        raise SystemExit("a wrong gradient has passed")
    except UserError as error:
        assert "disagrees with finite differences" in str(error), error
    divided_checker.DividedCheck = DividedCheck
print("good")
world.close()
"""


def perceptron(path: Path) -> Path:
    random = np.random.default_rng(0)
    sizes = [6, 36, 28, 24, 16, 3]
    nodes, tensors, before = [], {}, "x"
    for number, (rows, columns) in enumerate(pairwise(sizes)):
        weight, bias, made = f"w{number}", f"b{number}", f"h{number}"
        tensors[weight] = (random.normal(size=(rows, columns)) / 3).astype("float32")
        tensors[bias] = random.normal(size=columns).astype("float32")
        nodes.append(helper.make_node("MatMul", [before, weight], [f"{made}.product"], f"/product{number}"))
        nodes.append(helper.make_node("Add", [f"{made}.product", bias], [made], f"/add{number}"))
        before = made
        if number < len(sizes) - 2:
            before = f"{made}.tanh"
            nodes.append(helper.make_node("Tanh", [made], [before], f"/tanh{number}"))
    return save_model(path, nodes, [value("x", ["batch", 6])], [value(before, ["batch", 3])], tensors)


@pytest.mark.rotates
@pytest.mark.parametrize("ranks", LAYOUTS)
def test_a_state_of_any_layout_is_every_layouts(ranks: int, tmp_path: Path) -> None:
    folders = []
    for number, parallel in enumerate(LAYOUTS[ranks]):
        folder = tmp_path / str(number)
        folder.mkdir()
        changes = {"resources__ranks_per_node": ranks, "parallel": parallel, "train__gradient_accumulation": 2}
        built(perceptron(folder / "model.onnx"), **changes)
        spec = run_file(folder / "model.onnx", **changes)
        (folder / "spec.json").write_text(json.dumps(spec.model_dump(mode="json")))
        folders.append(str(folder))
    settings = {**(FEW_CORES if ranks > 2 else {}), "OMP_NUM_THREADS": "1", "ORTFLOW_CACHE": str(tmp_path / "cache")}
    all_good(ranks, PROGRAM, *folders, timeout=280, **settings)


CHECKING = """
import sys
from pathlib import Path
import numpy as np
from ortflow.workflow.comm.mpi import MpiCommunicator
from ortflow.workflow.device.cpu import CpuDevice
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.types import GraphSet
from ortflow.workflow.sessions.session import Sessions
from ortflow.workflow.spec.run import TrainerRunSpec
from ortflow.workflow.trainer import MicroBatch, Report
from ortflow.workflow.trainer.divided_opening import open_divided

world = MpiCommunicator()
folder = Path(sys.argv[1])
spec = TrainerRunSpec.model_validate_json((folder / "spec.json").read_text())
trainer = open_divided(
    GraphSet.load(folder / "graphs"), spec, Sessions(CpuDevice(), 1, "error"), world, Report(),
)
random = np.random.default_rng(1)
arrays = {"x": random.normal(size=(16, 6)).astype("float32"), "labels": random.integers(0, 3, 16)}
part = trainer.training.checker.holding
honest = part.gradient_of

def spoiled(batch, seed):
    loss, gradients = honest(batch, seed)
    if "scale" in part.index:
        entry = part.index["scale"]
        gradient = gradients.slice(entry.offset, entry.end)
        gradient.write(-gradient.read())
    return loss, gradients

before = {entry.name: part.values(entry.name) for entry in part.index}
trainer.check([MicroBatch(arrays, 16)])
for name, values in before.items():
    assert np.array_equal(part.values(name), values), name
part.gradient_of = spoiled
import ortflow.workflow.trainer.check.divided_check as checking
checking.VERSION += 1  # or it would remember that it has passed
try:
    trainer.check([MicroBatch(arrays, 16)])
    raise SystemExit("a wrong gradient has passed")
except UserError as error:
    assert "'scale'" in str(error), error
print("good")
world.close()
"""


def test_the_check_does_not_refuse_branches_that_begin_at_zero(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"resources__ranks_per_node": 2, "parallel": {"pipeline": 2}}
    model = residual(tmp_path / "model.onnx")
    built(model, **changes)
    (tmp_path / "spec.json").write_text(json.dumps(run_file(model, **changes).model_dump(mode="json")))
    all_good(2, CHECKING, str(tmp_path), timeout=120, OMP_NUM_THREADS="1", ORTFLOW_CACHE=str(tmp_path / "cache"))


def test_another_layout_is_a_warning_and_not_refused() -> None:
    before, now = (
        {"graphs": "g", "kernels": "k", "layout": layout} for layout in ("data 2 x pipeline 1", "pipeline 2")
    )
    assert breaking(before, now, same_ranks=True) == []
    assert alike(list(map(str, differences(before, now))), ["layout: … data 2 x pipeline 1 … pipeline 2 …"])


def test_a_run_keeps_its_graphs_and_changes_its_replicas(tmp_path: Path) -> None:
    model = perceptron(tmp_path / "model.onnx")
    parallel = {"pipeline": 2, "horizontal": 2}
    before, now = (run_file(model, resources__ranks_per_node=ranks, parallel=parallel) for ranks in (4, 8))
    graphs = built(model, resources__ranks_per_node=4, parallel=parallel)
    assert fingerprint_of(before) == fingerprint_of(now)
    assert division_of(graphs, before).grid == before.grid
    division = division_of(graphs, now)
    assert division.grid == now.grid
    shares = [Exchange(division, trained=False, sharded=False).share(rank) for rank in range(8)]
    assert shares == [share(graphs.index.size, rank, 8) for rank in range(8)]
    # The second replica of the first stage, which the grid before had no rank for.
    assert division.of(now.grid.place(2)) is division.holdings[0]


def test_the_first_stage_holds_what_no_stage_reads(tmp_path: Path) -> None:
    path = perceptron(tmp_path / "model.onnx")
    model = onnx.load(path)
    pooler = numpy_helper.from_array(np.ones((16, 4), np.float32), "pooler.weight")
    model.graph.initializer.append(pooler)
    model.graph.node.append(helper.make_node("MatMul", ["h3.tanh", "pooler.weight"], ["pooled"], "/pooler"))
    model.graph.output.append(value("pooled", ["batch", 4]))
    onnx.save(model, path)
    changes: dict[str, Any] = {"resources__ranks_per_node": 2, "parallel": {"pipeline": 2}}
    loss = {"kind": "cross_entropy", "output": "h4"}
    graphs = built(path, loss, **changes)
    first, last = division_of(graphs, run_file(path, loss, **changes)).holdings
    assert first.index["pooler.weight"].tensor == Tensor("pooler.weight", (16, 4), "frozen")
    assert "pooler.weight" not in last.index


def test_masks_of_a_stage_wait_for_each_other_once(tmp_path: Path) -> None:
    model = stage_models.transformer(tmp_path / "model.onnx", layers=2, dropout=0.1)
    parallel = {"pipeline": 2, "horizontal": 2}
    graphs = built(model, resources__ranks_per_node=4, parallel=parallel)
    nodes = onnx.load(graphs.root / "part-1" / "stage01.train.onnx").graph.node
    dropouts = [node for node in nodes if node.op_type == "Dropout"]
    waits = [node for node in nodes if node.op_type == "Where" and node.input[1] == node.input[2]]
    assert len(waits) == len(dropouts) - 1 > 1


def test_parts_with_other_collectives_are_refused() -> None:
    alike: dict[str, list[Kind]] = {"train.onnx": [Kind.ALL_REDUCE, Kind.ALL_REDUCE_MAX], "eval.onnx": []}
    check_alike([alike, alike])
    others: list[dict[str, list[Kind]]] = [
        {**alike, "train.onnx": [Kind.ALL_REDUCE_MAX, Kind.ALL_REDUCE]},
        {**alike, "train.onnx": [Kind.ALL_REDUCE]},
        {"eval.onnx": []},
    ]
    for other in others:
        with pytest.raises(UserError, match=r"parts 0 and 2.*train\.onnx"):
            check_alike([alike, alike, other])


@pytest.mark.parametrize(("group", "rows"), [("state", 6), ("frozen", 2)])
def test_all_stages_check_as_many_samples(group: Any, rows: int, tmp_path: Path, monkeypatch: Any) -> None:
    checked: list[tuple[int, int]] = []

    class Recorded:
        def __init__(self, *given: Any) -> None: ...

        def run(self, batch: MicroBatch, keys: Any) -> None:
            checked.append((batch.count, len(batch.arrays["x"])))

    monkeypatch.setattr("ortflow.workflow.trainer.check.divided_checker.DividedCheck", Recorded)
    whole = FlatIndex.place([Tensor("w", (3,), "decay"), Tensor("mean", (3,), group)])
    spec, world = run_file(tmp_path / "model.onnx", data__micro_batch=6), SoloCommunicator()
    # The stage of this rank has no running statistics.
    division = Mock(whole=whole)
    holding = Mock(graphs=Mock(root=tmp_path), index=FlatIndex.place([whole["w"].tensor]), division=division)
    ranks, parts = Mock(world=world, place=Place(0, 0, 0)), Mock()
    parts.context.spec, parts.context.sessions.kernels = spec, ""
    checker = DividedChecker(Mock(inputs=[]), holding, parts, ranks)
    checker.check([MicroBatch({"x": np.zeros((8, 2), np.float32)}, 8)])
    assert checked == [(rows, rows)]


def test_graphs_of_parts_are_looked_after_like_the_others(tmp_path: Path) -> None:
    model = perceptron(tmp_path / "model.onnx")
    changes: dict[str, Any] = {"resources__ranks_per_node": 2, "parallel": {"pipeline": 2}}
    graphs = built(model, **changes)
    hashes = hashes_of(graphs.root)
    assert "division.json" in hashes
    assert {"part-0/stages.json", "part-0/stage00.forward.onnx"} <= hashes.keys()
    assert damage(graphs.root, hashes) is None
    forward = graphs.root / "part-0" / "stage00.forward.onnx"
    forward.write_bytes(forward.read_bytes()[:-1])
    assert damage(graphs.root, hashes) == f"{forward} is damaged"
    built(model, resources__ranks_per_node=2)
    assert GraphSet.load(graphs.root).index.size
    assert not (graphs.root / "division.json").exists()
    assert not forward.parent.exists()
    specs = [
        run_file(model, resources__ranks_per_node=4, parallel=parallel)
        for parallel in ({}, {"zero": 1}, {"pipeline": 2}, {"pipeline": 2, "schedule": "gpipe"}, {"horizontal": 2})
    ]
    plain, zero, pipeline, gpipe, horizontal = map(fingerprint_of, specs)
    assert plain == zero
    assert pipeline == gpipe
    assert len({plain, pipeline, horizontal}) == 3
