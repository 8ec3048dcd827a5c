"""Runs of pipelines that are cut by the measured time of their nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_sets import write_batches
from project import logs, of_kind
from stage_models import CLASSES, WIDE, needing_its_weights, slow_at_first
from tiny_runs import Tiny

from ortflow.workflow.assembly.timing import recorded
from ortflow.workflow.graph.stages.node_costs import NAME, NodeCosts
from ortflow.workflow.run.rundir import RunDir

pytestmark = pytest.mark.rotates("measured runs")

SHAPE: dict[str, Any] = {
    "parallel": {"pipeline": 2}, "resources": {"ranks_per_node": 2, "cpus_per_rank": 1},
    "data": {"train": "wide.arrow", "micro_batch": 64},
    "train": {"optimizer": {"name": "sgd", "lr": 1e-3}, "steps": 2, "gradient_accumulation": 2},
}  # fmt: skip


def made(folder: Path, **changes: Any) -> Tiny:
    tiny = Tiny.make(folder, **{**SHAPE, **changes})
    random = np.random.default_rng(0)
    x = random.normal(size=(512, WIDE)).astype(np.float32)
    write_batches(tiny.folder / "wide.arrow", {"x": x, "labels": random.integers(0, CLASSES, 512)})
    return tiny


def trained(tiny: Tiny, steps: int, *changes: str) -> list[dict[str, Any]]:
    """Train to a step; every event about the stages so far."""
    done = tiny.command("run", "run.yaml", f"train.steps={steps}", *changes, timeout=200)
    assert done.code == 0, done.said + logs(tiny.run_dir)
    assert [event["step"] for event in of_kind(tiny.run_dir, "step")] == list(range(1, steps + 1))
    return of_kind(tiny.run_dir, "stages")


def test_a_run_is_cut_where_its_time_is_and_stays_so(tmp_path: Path) -> None:
    tiny = made(tmp_path / "slow")
    slow_at_first(tiny.folder / "model.onnx")
    (first,) = trained(tiny, 2)
    assert first["chosen"] == "measured"
    ((cut,),) = first["cuts"]
    assert cut.startswith("asinh."), "where the counted operations would not cut"
    before, after = first["stage_seconds"]
    assert 1 / 3 < before / after < 3
    assert first["operations"][1] > 3 * first["operations"][0]
    assert first["sent_bytes"] == [64 * WIDE * 4]
    assert f"stage 0 ends with {cut}" in logs(tiny.run_dir)
    assert "ms measured" in logs(tiny.run_dir)
    graphs = RunDir(tiny.run_dir).graphs
    assert len(trained(tiny, 4)) == 1, "the graphs stay"
    # What the clock of this machine would never say.
    found = recorded(graphs)
    assert found is not None
    slow = ("5.product", "6.product")
    late = {name: (1.0 if name in slow else 1e-6, counted) for name, (_, counted) in found.nodes.items()}
    (graphs / NAME).write_bytes(NodeCosts(found.key, late, found.batch).to_bytes())
    moved = trained(tiny, 6)[-1]
    assert moved["cuts"] == [["5.product"]]
    next((graphs / "part-0").glob("*.forward.onnx")).unlink()
    rebuilt = trained(tiny, 8)
    assert len(rebuilt) == 3
    assert rebuilt[-1]["cuts"] == moved["cuts"]
    other = trained(tiny, 9, "parallel={pipeline: 3}", "resources.ranks_per_node=3")[-1]
    assert ["5.product"] in other["cuts"], "another layout is cut by the same record"
    (graphs / NAME).unlink()
    assert trained(tiny, 10)[-1]["cuts"][0][0].startswith("asinh."), "measured anew"


def test_a_run_with_named_cuts_measures_nothing(tmp_path: Path) -> None:
    tiny = made(tmp_path / "named", parallel={"pipeline": 2, "cuts": [["7.product"]]})
    slow_at_first(tiny.folder / "model.onnx")
    (event,) = trained(tiny, 1)
    assert (event["chosen"], event["cuts"], event["stage_seconds"]) == ("named", [["7.product"]], [None, None])
    assert not (RunDir(tiny.run_dir).graphs / NAME).exists()


def test_the_wait_of_the_ranks_is_reported_beside_the_formula(tmp_path: Path) -> None:
    """Nearly all is in the first stage, so that the second waits much longer than one of equal stages."""
    several = {**SHAPE["train"], "gradient_accumulation": 8}
    tiny = made(tmp_path / "waiting", parallel={"pipeline": 2, "cuts": [["7.product"]]}, train=several)
    slow_at_first(tiny.folder / "model.onnx")
    trained(tiny, 1)
    assert of_kind(tiny.run_dir, "pipeline") == [], "the first step is not counted"
    trained(tiny, 8)
    (found,) = of_kind(tiny.run_dir, "pipeline")
    assert found["formula"] == pytest.approx(1 / 9, abs=1e-6)
    first, second = found["busy_seconds"]
    assert 0 < second < first / 2
    assert first <= found["seconds"]
    assert found["idle"] == pytest.approx(1 - (first + second) / 2 / found["seconds"], abs=1e-4)
    assert 0.25 < found["idle"] < 0.75
    assert of_kind(tiny.run_dir, "pipeline", rank=1) == []
    assert "pipeline: ranks waited" in logs(tiny.run_dir)


@pytest.mark.parametrize("command", [["validate", "run.yaml"], ["plan", "run.yaml", "--no-measure"]])
def test_what_only_looks_measures_nothing(command: list[str], tmp_path: Path) -> None:
    tiny = made(tmp_path / "looked")
    slow_at_first(tiny.folder / "model.onnx")
    done = tiny.command(*command)
    assert done.code == 0, done.said
    if command[0] == "plan":
        assert "counted operations" in done.out
        assert "time of each node" not in done.out
        trained(tiny, 1)
        assert "time of each node" in tiny.command(*command).out, "the run's record"


def test_a_run_whose_model_cannot_be_timed_is_cut_by_counted_operations(tmp_path: Path) -> None:
    frozen = {"parameters": {"freeze": ["rows", "table"]}}
    loss = {"kind": "cross_entropy", "label": "labels"}
    tiny = made(tmp_path / "untimed", model={"path": "model.onnx", "loss": loss, **frozen})
    needing_its_weights(tiny.folder / "model.onnx")
    (event,) = trained(tiny, 2)
    assert event["chosen"] == "counted"
    assert any("parallel.cuts" in warning["message"] for warning in of_kind(tiny.run_dir, "warning"))
