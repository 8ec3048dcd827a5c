"""A model with random operators trains reproducibly bit for bit: repeated, accumulated, resumed, and after a kill."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import onnx
import psutil
import pytest
from onnx import TensorProto, helper
from project import ORTFLOW, Project, curve, environment, evaluations, logs

from ortflow.launchers.supervision.processes import family, ranks_among

FAULTS = Path(__file__).parent.parent / "support" / "faults"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = Project.make(tmp_path_factory.mktemp("random"))
    path = project.folder / "model.onnx"
    model = onnx.load(path)
    (output,) = model.graph.output
    name = output.name
    for node in model.graph.node:
        node.output[:] = [f"{name}.plain" if made == name else made for made in node.output]
    half = onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(helper.make_tensor("", 1, [], [0.5])), "half")
    model.graph.initializer.append(half)
    model.graph.node.extend(
        [
            helper.make_node("RandomNormalLike", [f"{name}.plain"], ["noise"], "/noise"),
            helper.make_node("RandomUniformLike", [f"{name}.plain"], ["scale"], "/scale", seed=4.0, low=0.5, high=1.5),
            helper.make_node("Expand", ["half", "noise.shape"], ["chances"], "/chances"),
            helper.make_node("Bernoulli", ["chances"], ["kept"], "/kept", dtype=TensorProto.FLOAT),
            helper.make_node("Mul", ["noise", "kept"], ["some"], "/some"),
            helper.make_node("Mul", [f"{name}.plain", "scale"], ["scaled"], "/scaled"),
            helper.make_node("Add", ["scaled", "some"], [name], "/noisy"),
        ]
    )
    shape = helper.make_node("Shape", [f"{name}.plain"], ["noise.shape"], "/shape")
    model.graph.node.insert(len(model.graph.node) - 7, shape)
    onnx.save(model, path)
    return project


@pytest.fixture(scope="module")
def whole(project: Project) -> Path:
    return project.run("whole", train__schedule={"name": "constant"}, train__gradient_accumulation=2)


def test_numbers_differ_between_steps_and_ranks_and_the_run_learns(whole: Path) -> None:
    losses = [loss for _, loss, *_ in curve(whole)]
    assert losses[-1] < losses[0] - 0.5
    assert len(set(losses)) == len(losses)


@pytest.mark.rotates("random numbers")
def test_a_resumed_run_draws_the_same_numbers(project: Project, whole: Path) -> None:
    same = {"train__schedule": {"name": "constant"}, "train__gradient_accumulation": 2}
    project.run("parts", **same, train__steps=11)
    parts = project.run("parts", **same)
    assert curve(parts) == curve(whole)
    assert evaluations(parts)[-1] == evaluations(whole)[-1]


@pytest.mark.rotates("random numbers")
def test_a_killed_run_draws_the_same_numbers(project: Project, whole: Path) -> None:
    file = project.write("killed", train__schedule={"name": "constant"}, train__gradient_accumulation=2)
    run_dir = project.run_dir("killed")
    # A step of this model takes about a millisecond: without it, the run can end before the process is found.
    slow = environment(PYTHONPATH=str(FAULTS), SLOW="0.2 1")
    with subprocess.Popen([*ORTFLOW, "run", file.name], cwd=project.folder, env=slow) as launcher:
        killed = None
        while killed is None and launcher.poll() is None:
            if (run_dir / "checkpoints" / "step-00000010").exists():
                killed = ranks_among(family(psutil.Process(launcher.pid))).get(1)
            time.sleep(0.02)
        assert killed is not None, logs(run_dir)
        killed.kill()
        assert launcher.wait(120) == 0, logs(run_dir)
    assert curve(run_dir) == curve(whole)
    assert evaluations(run_dir) == evaluations(whole)
