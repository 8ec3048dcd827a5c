"""Whole runs on a GPU, through the command line: the CPU's curve, bit-identical restarts, alternating devices."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from project import ORTFLOW, Project, command, curve, environment, logs, of_kind

from ortflow.workflow.device.cudart import Runtime

ONE = {"resources__ranks_per_node": 1}
GPU = {**ONE, "resources__gpus_per_rank": 1}
CONSTANT = {"train__schedule": {"name": "constant"}}


@pytest.fixture(scope="module")
def project(cuda: Runtime, tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project.make(tmp_path_factory.mktemp("cuda"), dropout=0.0)


@pytest.fixture(scope="module")
def dropping(cuda: Runtime, tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project.make(tmp_path_factory.mktemp("cuda-dropout"), dropout=0.1)


def near(one: Path, other: Path, tolerance: float) -> None:
    """Check that the losses of two runs are equal to rounding."""
    mine, theirs = curve(one), curve(other)
    assert [step for step, *_ in mine] == [step for step, *_ in theirs]
    assert [loss for _, loss, *_ in mine] == pytest.approx([loss for _, loss, *_ in theirs], rel=tolerance)


def state(run_dir: Path) -> dict[str, str]:
    """Hashes of the newest checkpoint's tensors."""
    newest = max((run_dir / "checkpoints").glob("step-*"))
    return {
        str(path.name): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(newest.glob("*.safetensors"))
    }


def test_the_curve_is_that_of_the_cpu(project: Project) -> None:
    on_gpu, on_cpu = project.run("gpu", **GPU), project.run("cpu", **ONE)
    (record,) = of_kind(on_gpu, "environment")
    assert "NVIDIA" in record["device"]
    near(on_gpu, on_cpu, 1e-5)


def test_products_in_tf32_are_near(project: Project) -> None:
    run_dir = project.run("tf32", train__precision="tf32", **GPU)
    assert of_kind(run_dir, "environment")[0]["device"].endswith(", TF32, fused kernels")
    near(run_dir, project.run_dir("cpu") if project.run_dir("cpu").exists() else project.run("cpu", **ONE), 2e-3)
    norms = [[norm for _, _, norm, _ in curve(each)] for each in (run_dir, project.run_dir("cpu"))]
    assert norms[0] == pytest.approx(norms[1], rel=2e-2)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_killed_run_resumes_bit_for_bit(dropping: Project, accumulation: int) -> None:
    settings = {**GPU, "train__steps": 200, "train__gradient_accumulation": accumulation}
    whole = dropping.run(f"whole-{accumulation}", **settings)
    run_dir = killed(dropping, f"killed-{accumulation}", (30, 90), **settings)
    assert curve(run_dir) == curve(whole)
    assert state(run_dir) == state(whole)


def killed(project: Project, name: str, steps: Sequence[int], **settings: Any) -> Path:
    """A run to its end; its rank is killed at each of these steps."""
    file, run_dir = project.write(name, **settings), project.run_dir(name)
    with subprocess.Popen(
        [*ORTFLOW, "run", file.name], cwd=project.folder, env=environment(), stdout=subprocess.DEVNULL
    ) as running:
        try:
            for attempt, step in enumerate(steps):
                wait_for(run_dir, attempt, step, running)
                os.kill(of_kind(run_dir, "attempt_start")[-1]["pid"], signal.SIGKILL)
            assert running.wait(120) == 0, logs(run_dir)
        finally:
            running.kill()
    assert len(of_kind(run_dir, "attempt_start")) == len(steps) + 1
    return run_dir


def wait_for(run_dir: Path, attempt: int, step: int, running: subprocess.Popen[bytes]) -> None:
    """Wait until an attempt has done a step."""
    end = time.monotonic() + 60
    while time.monotonic() < end and running.poll() is None:
        if (run_dir / "events" / "rank-0000.jsonl").exists() and any(
            record["attempt"] == attempt and record["step"] >= step for record in of_kind(run_dir, "step")
        ):
            return
        time.sleep(0.005)
    raise AssertionError(f"no step {step} of attempt {attempt}\n{logs(run_dir)}")


def test_alternating_devices_give_one_curve(project: Project) -> None:
    whole = project.run("turns-whole", train__steps=60, **CONSTANT, **ONE)
    for steps, device in ((20, GPU), (40, {**ONE, "resources__gpus_per_rank": 0}), (60, GPU)):
        run_dir = project.run("turns", train__steps=steps, **CONSTANT, **device)
    assert [record["step"] for record in of_kind(run_dir, "resume")] == [20, 40]
    warnings = [record["message"] for record in of_kind(run_dir, "warning")]
    assert any("device: NVIDIA" in message and "cpu now" in message for message in warnings), warnings
    near(run_dir, whole, 1e-4)


def test_two_ranks_share_a_gpu(project: Project, cuda: Runtime) -> None:
    if cuda.count() > 1:
        pytest.skip("each rank has its own here")
    on_gpu = project.run("shared", resources__gpus_per_rank=1)
    assert "MPI, because ranks share a GPU" in logs(on_gpu)
    near(on_gpu, project.run("two-on-cpu"), 1e-5)


def test_two_gpus_give_the_curve_of_two_ranks_on_cpus(project: Project, cuda: Runtime) -> None:
    if cuda.count() < 2:
        pytest.skip("needs two GPUs")
    on_gpus = project.run("two-gpus", resources__gpus_per_rank=1)
    assert "sums over the ranks' GPUs: NCCL" in logs(on_gpus)
    near(on_gpus, project.run("two-cpus"), 1e-5)


def test_a_machine_without_gpus_is_reported_in_one_sentence(project: Project) -> None:
    file = project.write("hidden", **GPU)
    done = command("run", file.name, folder=project.folder, CUDA_VISIBLE_DEVICES="")
    said = done.stdout + done.stderr + logs(project.run_dir("hidden"))
    assert done.returncode == 2, said
    assert "resources.gpus_per_rank: " in said
    assert "shows this rank no GPU: CUDA_VISIBLE_DEVICES is ''" in said
