"""A run on any ONNX Runtime: what is recorded, what its graphs consist of, and that it learns and resumes."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
from project import Project, command, curve, evaluations, logs, of_kind

from ortflow.workflow.onnx_runtime import onnxruntime
from ortflow.workflow.system.runtimes import installed_runtime

STEPS, HALF = 20, 10


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project.make(tmp_path_factory.mktemp("runtimes"))


def run(project: Project, name: str, steps: int = STEPS, kernels: str = "auto") -> Path:
    constant = {"name": "constant", "warmup_steps": 5}
    file = project.write(name, train__steps=steps, train__schedule=constant, resources__kernels=kernels)
    done = command("run", file.name, folder=project.folder)
    assert done.returncode == 0, done.stdout + done.stderr + logs(project.run_dir(name))
    return project.run_dir(name)


def once(project: Project, name: str, kernels: str) -> Path:
    """The run of twenty steps that several tests check."""
    run_dir = project.run_dir(name)
    return run_dir if run_dir.exists() else run(project, name, kernels=kernels)


@pytest.fixture(scope="module", params=["auto", "onnxruntime"])
def kernels(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def whole(project: Project, kernels: str) -> Path:
    """Two ranks, twenty steps."""
    return once(project, f"whole-{kernels}", kernels)


def test_the_record_names_the_package(whole: Path) -> None:
    (recorded,) = of_kind(whole, "environment")
    assert recorded["package"] == installed_runtime()
    assert recorded["onnxruntime"] == onnxruntime.__version__
    manifest = json.loads((whole / "checkpoints" / f"step-{STEPS:08d}" / "manifest.json").read_text())
    assert manifest["environment"].items() <= recorded.items()


def test_graphs_have_nothing_of_the_training_package(whole: Path) -> None:
    """Operators of com.microsoft that every ONNX Runtime has may stay."""
    found = set()
    for path in (whole / "graphs").glob("*.onnx"):
        graph = onnx.load(path).graph
        found |= {node.op_type for node in graph.node if node.domain == "com.microsoft"}
    assert found <= {"BiasGelu", "FastGelu", "FusedMatMul", "Gelu", "QuickGelu"}


def test_a_run_learns(whole: Path) -> None:
    losses = [loss for _, loss, _, _ in curve(whole)]
    assert len(losses) == STEPS
    assert losses[-1] < 0.8 * losses[0]
    assert (whole / "export" / "model.onnx").exists()


def test_a_run_continues_bit_identically(project: Project) -> None:
    whole = once(project, "whole-auto", "auto")
    run(project, "stopped", HALF)
    run_dir = run(project, "stopped", STEPS)
    assert [record["step"] for record in of_kind(run_dir, "resume")] == [HALF]
    assert curve(run_dir) == curve(whole)
    assert evaluations(run_dir)[-1] == evaluations(whole)[-1]
