"""Whole runs with `model.recompute: layers` under every layout: curve and model of a run that keeps all values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from messages import mentions
from onnx import numpy_helper
from project import FEW_CORES, Project, command, curve, evaluations, logs, of_kind

pytestmark = pytest.mark.rotates

SHAPE: dict[str, Any] = {
    "train__steps": 20, "train__global_batch": 8, "data__micro_batch": 2, "resources__cpus_per_rank": 1,
    "train__schedule": {"name": "constant"}, "checkpoint__every_steps": 10,
    "train__optimizer": {"name": "adamw", "lr": 1e-3, "weight_decay": 0.1}, "train__clip_norm": 1.0,
}  # fmt: skip
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "data": (2, {}),
    "zero-3": (2, {"zero": 3}),
    "pipeline": (2, {"pipeline": 2}),
    "horizontal": (2, {"horizontal": 2}),
    "sequence": (2, {"horizontal": 2, "sequence_parallel": True}),
    "pipeline-horizontal": (4, {"pipeline": 2, "horizontal": 2}),
}
NAMED = [["h.0.output"], ["h.1.output"]]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project.make(tmp_path_factory.mktemp("recompute"), dropout=0.0)


def run(project: Project, name: str, ranks: int, parallel: dict[str, Any], **changes: Any) -> Path:
    file = project.write(name, **{**SHAPE, "resources__ranks_per_node": ranks, "parallel": parallel, **changes})
    done = command("run", file.name, folder=project.folder, timeout=400, **FEW_CORES)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{logs(project.run_dir(name))}"
    return project.run_dir(name)


@pytest.fixture(scope="module")
def one_rank(project: Project) -> Path:
    return run(project, "one-rank", 1, {})


def exported(run_dir: Path) -> dict[str, npt.NDArray[Any]]:
    model = onnx.load(run_dir / "export" / "model.onnx")
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_recomputes_layers_and_trains_as_one_rank_does(name: str, project: Project, one_rank: Path) -> None:
    found = run(project, name, *LAYOUTS[name], model__recompute="layers")
    assert mentions(logs(found), "2 layers … h.0.output, h.1.output")
    whole = " for the undivided model" if {"pipeline", "horizontal"} & LAYOUTS[name][1].keys() else ""
    assert mentions(logs(found), f"model.recompute, predicted{whole}: … MB in place of … more operations")
    np.testing.assert_allclose(np.array(curve(found)), np.array(curve(one_rank)), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.array(evaluations(found)), np.array(evaluations(one_rank)), rtol=1e-5, atol=1e-6)
    here, there = exported(found), exported(one_rank)
    for tensor, expected in there.items():
        np.testing.assert_allclose(here[tensor], expected, rtol=1e-5, atol=1e-5, err_msg=tensor)


@pytest.mark.parametrize("recompute", ["layers", NAMED, ["h.*"]], ids=["layers", "named", "scopes"])
def test_a_run_with_dropout_keeps_its_bits(recompute: Any, tmp_path: Path) -> None:
    project = Project.make(tmp_path / "dropout", dropout=0.2)
    kept = run(project, "kept", 1, {})
    again = run(project, "again", 1, {}, model__recompute=recompute)
    assert "recomputed for the backward pass" in logs(again)
    assert curve(again) == curve(kept)
    for name, expected in exported(kept).items():
        np.testing.assert_array_equal(exported(again)[name], expected, err_msg=name)
    memory = of_kind(again, "memory")
    assert memory, "the run reports no memory"
