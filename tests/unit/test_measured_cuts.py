"""Automatic cuts weigh measured seconds, and every later build cuts where the first one did."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
import pytest
from graph_build_models import kept_child, run_file, save_model, value
from messages import mentions
from onnx import helper
from stage_models import CLASSES, WIDE, needing_its_weights, opened, slow_at_first, transformer

from ortflow.workflow.assembly import build
from ortflow.workflow.assembly.child import Child
from ortflow.workflow.assembly.timing import Timing, recorded, wants_costs
from ortflow.workflow.data.inputs import BatchInput
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.stages.costs import costs_for
from ortflow.workflow.graph.stages.node_costs import NAME, NodeCosts
from ortflow.workflow.graph.types import GraphSet
from ortflow.workflow.parallel.division import folder_of
from ortflow.workflow.parallel.stage import StageSet

ROWS = 64


class Clocked(Child):
    """A child whose clock shows what a test wants, by the first output of a node and its place."""

    def __init__(self, seconds: Callable[[str, int], float]) -> None:
        super().__init__()
        self.seconds, self.asked = seconds, 0

    def profile(self, model: bytes, feeds: Any, weights: Any, threads: int) -> dict[str, float]:
        self.asked += 1
        nodes = onnx.load_from_string(model).graph.node
        measured = super().profile(model, feeds, weights, threads)
        shown = {node.name: self.seconds(node.output[0], place) for place, node in enumerate(nodes)}
        return {name: shown[name] for name in measured}


def samples(inputs: Any = ()) -> dict[str, np.ndarray[Any, Any]]:
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, WIDE)).astype("float32")
    return {"x": x, "labels": random.integers(0, CLASSES, ROWS)}


TIMING = Timing(samples, 1)


def cut(model: Path, timing: Timing | None, child: Child | None = None, **changes: Any) -> tuple[list[str], GraphSet]:
    """The last tensor of each stage but the last, and the graphs."""
    shape = {"parallel__pipeline": 2, "data__micro_batch": ROWS, **changes}
    spec = run_file(model, **shape, resources__ranks_per_node=shape["parallel__pipeline"])
    with mock.patch.object(build, "Child") as started:
        started.return_value.__enter__.return_value = child or kept_child()
        graphs = build.build_graphs(spec, model.parent / "graphs", timing=timing)
    stages = StageSet.load(folder_of(graphs.root, 0)).stages
    return [each.sends[-1].name for each in stages[:-1]], graphs


def costs(graphs: GraphSet) -> list[float | None]:
    return [each.cost.seconds if each.cost else None for each in StageSet.load(folder_of(graphs.root, 0)).stages]


def test_an_operator_that_takes_longer_than_it_counts_moves_the_cut(tmp_path: Path) -> None:
    model = slow_at_first(tmp_path / "m.onnx")
    (counted,), without = cut(model, None)
    assert counted.endswith(".product"), "half of the operations"
    assert costs(without) == [None, None]
    assert not (without.root / NAME).exists()
    (measured,), graphs = cut(model, TIMING)
    assert measured.startswith("asinh.")
    first, second = costs(graphs)
    assert first is not None
    assert second is not None
    assert 0 < first < 0.1
    assert 1 / 3 < first / second < 3
    assert any(line.startswith("stage 0 in a forward pass") and "ms measured" in line for line in graphs.notes)
    assert graphs.warnings == ()


def asinh_takes(seconds: float) -> Callable[[str, int], float]:
    """A clock by which all other nodes take a millisecond."""
    return lambda name, _: seconds if name.startswith("asinh.") else 1e-3


def test_a_disturbed_node_does_not_move_the_cut(tmp_path: Path) -> None:
    """Another program ran while one of several equal nodes was timed."""
    model = slow_at_first(tmp_path / "m.onnx")
    quiet, disturbed = asinh_takes(1e-3), {"asinh.3": 0.5, "6.product": 0.3}
    with Clocked(quiet) as one, Clocked(lambda name, at: disturbed.get(name, quiet(name, at))) as other:
        first, graphs = cut(model, TIMING, one)
        (graphs.root / NAME).unlink()
        assert cut(model, TIMING, other)[0] == first
        assert (one.asked, other.asked) == (1, 1)


def test_the_record_counts_when_the_clock_says_otherwise(tmp_path: Path) -> None:
    """Rebuilt graphs are cut where they were, and another layout is cut by the same times."""
    model = slow_at_first(tmp_path / "m.onnx")
    with Clocked(asinh_takes(1.0)) as early, Clocked(asinh_takes(1e-9)) as late:
        first, graphs = cut(model, TIMING, early)
        files = {path.name: path.read_bytes() for path in folder_of(graphs.root, 0).iterdir()}
        assert early.asked == 1
        again, graphs = cut(model, TIMING, late)
        assert {path.name: path.read_bytes() for path in folder_of(graphs.root, 0).iterdir()} == files
        assert again == first
        three, _ = cut(model, TIMING, late, parallel__pipeline=3)
        assert all(name.startswith("asinh.") for name in three), "where the first clock saw the time"
        assert cut(model, TIMING, late)[0] == first, "through another layout"
        assert cut(model, None, late)[0] == first, "an export, say"
        assert late.asked == 0
        (graphs.root / NAME).unlink()
        other, _ = cut(model, TIMING, late)
        assert other != first, "the clocks differ"
        assert late.asked == 1


def test_a_damaged_record_is_measured_again(tmp_path: Path) -> None:
    model = slow_at_first(tmp_path / "m.onnx")
    _, graphs = cut(model, TIMING)
    record = (graphs.root / NAME).read_bytes()
    assert NodeCosts.from_bytes(record).to_bytes() == record
    for damaged in (b"", b"[]", b'"x"', record[:-20], record.replace(b'"fault": null', b'"fault": "x"'), b"{" * 10**5):
        (graphs.root / NAME).write_bytes(damaged)
        assert recorded(graphs.root) is None
    cut(model, TIMING)
    assert recorded(graphs.root) is not None


@pytest.mark.parametrize("change", ["model", "micro-batch"])
def test_another_model_or_batch_is_measured_again(change: str, tmp_path: Path) -> None:
    model = slow_at_first(tmp_path / "m.onnx")
    _, graphs = cut(model, TIMING)
    before = recorded(graphs.root)
    if change == "model":
        slow_at_first(model, products=9)
    cut(model, TIMING, data__micro_batch=ROWS if change == "model" else ROWS // 2)
    after = recorded(graphs.root)
    assert before is not None
    assert after is not None
    assert after.key != before.key


def test_named_cuts_are_not_measured(tmp_path: Path) -> None:
    model = slow_at_first(tmp_path / "m.onnx")
    with Clocked(lambda *_: 1.0) as child:
        named, graphs = cut(model, TIMING, child, parallel__cuts=[["5.product"]])
        assert named == ["5.product"]
        assert child.asked == 0
    assert not (graphs.root / NAME).exists()


def test_only_pipelines_of_cpu_ranks_without_named_cuts_are_measured() -> None:
    file = Path("m.onnx")
    assert wants_costs(run_file(file, parallel__pipeline=2))
    assert not wants_costs(run_file(file))
    assert not wants_costs(run_file(file, parallel__pipeline=2, parallel__cuts=[["x"]]))
    assert not wants_costs(run_file(file, parallel__pipeline=2, resources__gpus_per_rank=1))


def test_a_graph_that_cannot_run_on_random_weights_is_cut_by_counted_operations(tmp_path: Path) -> None:
    model = needing_its_weights(tmp_path / "m.onnx")
    frozen = {"model__parameters": {"freeze": ["rows", "table"]}}
    counted, _ = cut(model, None, **frozen)
    measured, graphs = cut(model, TIMING, **frozen)
    assert measured == counted
    assert costs(graphs) == [None, None]
    (warning,) = graphs.warnings
    assert mentions(warning, "indices element out of data bounds … counted operations … parallel.cuts")
    with Clocked(lambda *_: 1.0) as child:
        cut(model, TIMING, child, **frozen)
        assert child.asked == 0, "the failure is recorded, too"


def test_data_that_cannot_be_read_is_a_fault(tmp_path: Path) -> None:
    def unreadable(inputs: Any) -> Any:
        assert [each.name for each in inputs if isinstance(each, BatchInput)] == ["x", "labels"]
        raise UserError("there is no column")

    model = slow_at_first(tmp_path / "m.onnx")
    (counted,), graphs = cut(model, Timing(unreadable, 1))
    assert counted.endswith(".product")
    assert any("there is no column" in warning for warning in graphs.warnings)


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL])
def test_a_process_that_dies_is_a_fault(number: signal.Signals, tmp_path: Path) -> None:
    class Dying(Child):
        def profile(self, model: bytes, feeds: Any, weights: Any, threads: int) -> dict[str, float]:
            os.kill(self.process.pid, number)
            return super().profile(model, feeds, weights, threads)

    with Dying() as child:
        (counted,), graphs = cut(slow_at_first(tmp_path / "m.onnx"), TIMING, child)
    assert counted.endswith(".product")
    assert any("parallel.cuts" in warning for warning in graphs.warnings)


def test_a_model_that_cannot_be_cut_where_the_time_says_is_cut_elsewhere(tmp_path: Path) -> None:
    """Between BatchNormalization and a node that reads its running mean; half of the operations are before."""
    random = np.random.default_rng(0)
    tensors = {f"{number}.weight": random.normal(size=(WIDE, WIDE)) for number in range(4)}
    tensors |= {name: random.uniform(1, 2, WIDE) for name in ("scale", "shift", "mean", "var")}
    nodes, x = [], "x"
    for number in range(4):
        nodes.append(helper.make_node("MatMul", [x, f"{number}.weight"], [f"{number}.product"]))
        x = f"{number}.product"
    nodes += [
        helper.make_node("BatchNormalization", [x, "scale", "shift", "mean", "var"], ["normal"]),
        helper.make_node("Mul", ["normal", "mean"], ["scaled"]),
        helper.make_node("MatMul", ["scaled", "out"], ["y"]),
    ]
    tensors["out"] = random.normal(size=(WIDE, CLASSES))
    arrays = {name: array.astype("float32") for name, array in tensors.items()}
    ends = [value("x", ["batch", WIDE])], [value("y", ["batch", CLASSES])]
    model = save_model(tmp_path / "m.onnx", nodes, *ends, arrays)
    kept = {"model__accept_inference_export": True}
    counted, _ = cut(model, None, **kept)
    with Clocked(lambda name, _: 1.0 if name in ("normal", "scaled") else 1e-9) as child:
        measured, graphs = cut(model, TIMING, child, **kept)
        assert child.asked == 1
    assert measured == counted
    assert costs(graphs) == [None, None]
    assert any(mentions(line, "counted operations … running statistic 'mean'") for line in graphs.notes)


def test_a_part_of_a_layer_takes_its_share(tmp_path: Path) -> None:
    model = opened(transformer(tmp_path / "m.onnx"))
    whole = costs_for(model.prepared, {"tokens": [4, 16], "labels": [4, 16]})
    half = costs_for(model.prepared, {"tokens": [2, 16], "labels": [2, 16]})
    node = next(node for node in model.prepared.graph.node if node.output[0] == "h.0.mlp.c_fc.product")
    other = next(node for node in model.prepared.graph.node if node.output[0] == "h.1.mlp.c_fc.product")
    known = NodeCosts("", {node.output[0]: (3.0, whole.operations(node))})
    assert known.seconds(whole)(node) == 3.0
    assert known.seconds(half)(node) == pytest.approx(1.5, rel=0.1)
    assert known.seconds(whole)(other) == pytest.approx(3.0), "unknown: as long as its operations on average"


def test_bytes_are_those_of_the_batch(tmp_path: Path) -> None:
    """Also where the graph does not declare the axis."""
    model = opened(transformer(tmp_path / "m.onnx", dropout=0.1))
    found = costs_for(model.prepared, {"tokens": [4, 16], "labels": [4, 16]})
    assert {found.bytes(name) for name in ("h.0.output", "h.2.attended")} == {4 * 16 * 32 * 4}
