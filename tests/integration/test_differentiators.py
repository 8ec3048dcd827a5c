"""A run by ortflow's rules is the run by ONNX Runtime's gradient builder, to rounding, and goes on where that stopped.

By the rules alone where ONNX Runtime has no builder; the same runs then learn, are killed and go on.
"""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
from project import Project, command, curve, evaluations, logs, of_kind

from ortflow.workflow.onnx_runtime import TRAINING, onnxruntime
from ortflow.workflow.runtimes import installed_runtime

STEPS, HALF = 20, 10
RULES = {"ORTFLOW_DIFFERENTIATOR": "rules"}
needs_both = pytest.mark.skipif(not TRAINING, reason="needs the training package")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project.make(tmp_path_factory.mktemp("differentiators"))


def run(project: Project, name: str, steps: int = STEPS, kernels: str = "auto", **environment: str) -> Path:
    constant = {"name": "constant", "warmup_steps": 5}
    file = project.write(name, train__steps=steps, train__schedule=constant, resources__kernels=kernels)
    done = command("run", file.name, folder=project.folder, **environment)
    assert done.returncode == 0, done.stdout + done.stderr + logs(project.run_dir(name))
    return project.run_dir(name)


def once(project: Project, name: str, kernels: str, **environment: str) -> Path:
    """The run of twenty steps, which several tests look at."""
    run_dir = project.run_dir(name)
    return run_dir if run_dir.exists() else run(project, name, kernels=kernels, **environment)


@pytest.fixture(scope="module", params=["auto", "onnxruntime"])
def kernels(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def by_rules(project: Project, kernels: str) -> Path:
    """Two ranks, twenty steps."""
    return once(project, f"rules-{kernels}", kernels, **RULES)


def test_the_record_names_package_and_differentiator(by_rules: Path) -> None:
    (recorded,) = of_kind(by_rules, "environment")
    assert recorded["package"] == installed_runtime()
    assert recorded["onnxruntime"] == onnxruntime.__version__
    assert recorded["differentiator"] == "ortflow's"
    manifest = json.loads((by_rules / "checkpoints" / f"step-{STEPS:08d}" / "manifest.json").read_text())
    assert manifest["environment"].items() <= recorded.items()


def test_graphs_have_nothing_of_the_training_package(by_rules: Path) -> None:
    """Operators of com.microsoft that every ONNX Runtime has may stay."""
    found = set()
    for path in (by_rules / "graphs").glob("*.onnx"):
        graph = onnx.load(path).graph
        found |= {node.op_type for node in graph.node if node.domain == "com.microsoft"}
    assert found <= {"BiasGelu", "FastGelu", "FusedMatMul", "Gelu", "QuickGelu"}


def test_a_run_by_the_rules_learns(by_rules: Path) -> None:
    losses = [loss for _, loss, _, _ in curve(by_rules)]
    assert len(losses) == STEPS
    assert losses[-1] < 0.8 * losses[0]
    assert (by_rules / "export" / "model.onnx").exists()


@needs_both
def test_the_curve_is_that_of_the_builder(project: Project, by_rules: Path, kernels: str) -> None:
    built = once(project, f"built-{kernels}", kernels)
    assert of_kind(built, "environment")[0]["differentiator"] == "ONNX Runtime's"
    for mine, theirs in zip(curve(by_rules), curve(built), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)


def test_a_run_by_the_rules_goes_on_bit_for_bit(project: Project) -> None:
    whole = once(project, "rules-auto", "auto", **RULES)
    run(project, "stopped", HALF, **RULES)
    run_dir = run(project, "stopped", STEPS, **RULES)
    assert [record["step"] for record in of_kind(run_dir, "resume")] == [HALF]
    assert curve(run_dir) == curve(whole)
    assert evaluations(run_dir)[-1] == evaluations(whole)[-1]


@needs_both
@pytest.mark.parametrize(("name", "first", "then"), [("there", {}, RULES), ("back", RULES, {})])
def test_a_run_goes_on_by_the_other_one(
    project: Project, name: str, first: dict[str, str], then: dict[str, str]
) -> None:
    run_dir, more = run(project, name, HALF, **first), f"train.steps={STEPS}"
    done = command("resume", name, more, folder=project.folder, **then)
    said = done.stdout + done.stderr + logs(run_dir)
    assert done.returncode == 2, said
    assert "differentiator: " in said
    assert "checkpoint.exact=false" in said
    assert len(curve(run_dir)) == HALF, "nothing has changed"
    done = command("resume", name, more, "checkpoint.exact=false", folder=project.folder, **then)
    said = done.stdout + done.stderr + logs(run_dir)
    assert done.returncode == 0, said
    assert any("differentiator: " in warning["message"] for warning in of_kind(run_dir, "warning"))
    for mine, theirs in zip(curve(run_dir), curve(once(project, "built-auto", "auto")), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
