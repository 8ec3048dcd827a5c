"""Two ranks, each with a GPU of its own: the CPU's curve, whatever is summed when, and on whatever a run continues."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gpu_tables
import numpy as np
import pytest
from gpu_ranks import trained
from messages import mentions
from project import Project, curve, logs, of_kind
from test_cuda_runs import CONSTANT, near, state

from ortflow.workflow.device.cudart import Runtime

TWO = {"resources__ranks_per_node": 2, "resources__gpus_per_rank": 1}
ON_CPUS = {"resources__ranks_per_node": 2}
BUCKETS = "buckets during the backward pass"


@pytest.fixture(scope="module")
def project(cuda: Runtime, tmp_path_factory: pytest.TempPathFactory) -> Project:
    if cuda.count() < 2:
        pytest.skip("needs two GPUs")
    return Project.make(tmp_path_factory.mktemp("cuda-ranks"), dropout=0.0)


def test_buckets_are_captured_with_the_backward_pass(project: Project) -> None:
    captured = project.run("captured", **TWO)
    plain = project.run("queued", resources__cuda_graph=False, **TWO)
    for run_dir in (captured, plain):
        assert BUCKETS in logs(run_dir)
        assert "sums over the ranks' GPUs: NCCL" in logs(run_dir)
    assert "a micro-batch is captured as a CUDA graph" in logs(captured), logs(captured)
    assert curve(captured) == curve(plain)
    assert state(captured) == state(plain)
    near(captured, project.run("cpus", **ON_CPUS), 1e-5)


def test_accumulated_gradients_are_summed_in_one_piece(project: Project) -> None:
    settings = {"train__gradient_accumulation": 3}
    on_gpus = project.run("accumulated", **TWO, **settings)
    assert BUCKETS not in logs(on_gpus)
    near(on_gpus, project.run("accumulated-cpus", **ON_CPUS, **settings), 1e-5)


@pytest.mark.parametrize("captured", [True, False])
def test_a_rank_without_samples_takes_part_in_every_sum(project: Project, *, captured: bool) -> None:
    name = "last-captured" if captured else "last-queued"
    settings = {"train__steps": None, "train__epochs": 2, "data__micro_batch": 7, "data__last_batch": "keep"}
    on_gpus = project.run(name, resources__cuda_graph=captured, **TWO, **settings)
    assert BUCKETS in logs(on_gpus)
    on_cpus = project.run(f"{name}-cpus", **ON_CPUS, **settings)
    assert min(record["samples"] for record in of_kind(on_cpus, "step")) < 14
    near(on_gpus, on_cpus, 1e-5)


@pytest.mark.parametrize(
    "devices",
    [
        [TWO, {"resources__ranks_per_node": 1, "resources__gpus_per_rank": 1}, TWO],
        [TWO, {**ON_CPUS, "resources__gpus_per_rank": 0}, TWO],
    ],
    ids=["two-one-two", "gpu-cpu-gpu"],
)
def test_a_run_continues_on_other_devices(
    project: Project, devices: list[dict[str, Any]], request: pytest.FixtureRequest
) -> None:
    common: dict[str, Any] = {**CONSTANT, "train__global_batch": 8}
    name = request.node.callspec.id
    for steps, device in zip((20, 40, 60), devices, strict=True):
        run_dir = project.run(name, train__steps=steps, **common, **device)
    assert [record["step"] for record in of_kind(run_dir, "resume")] == [20, 40]
    # 60 steps of rounding on three devices: 1.3e-4 on an H200.
    near(run_dir, whole_on_cpus(project, common), 3e-4)


def whole_on_cpus(project: Project, common: dict[str, Any]) -> Path:
    run_dir = project.run_dir("turns-cpus")
    return run_dir if run_dir.exists() else project.run("turns-cpus", train__steps=60, **common, **ON_CPUS)


@pytest.mark.parametrize("precision", [{"precision": "bf16"}, {"precision": "fp16", "loss_scale": 1024}], ids=str)
def test_half_precision_on_two_gpus(project: Project, precision: dict[str, Any]) -> None:
    name, settings = precision["precision"], {f"train__{key}": value for key, value in precision.items()}
    on_gpus = project.run(name, **settings, **TWO)
    assert BUCKETS in logs(on_gpus)
    on_cpus = project.run(f"{name}-cpus", **ON_CPUS)
    near(on_gpus, on_cpus, 3e-3)


@pytest.fixture(scope="module")
def small(cuda: Runtime, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if cuda.count() < 2:
        pytest.skip("needs two GPUs")
    return tmp_path_factory.mktemp("small")


def test_gradients_that_enter_others_are_summed_once(small: Path) -> None:
    """Buckets are summed in place while the backward pass still reads this rank's own gradients."""
    on_gpus, on_cpus = trained(small, "gpu"), trained(small, "cpu")
    for (mine, _), (theirs, _) in zip(on_gpus, on_cpus, strict=True):
        for name in ("losses", "norms", "parameters"):
            np.testing.assert_allclose(mine[name], theirs[name], rtol=2e-5, atol=1e-6, err_msg=name)
    _, log = on_gpus[0]
    assert "a micro-batch is captured as a CUDA graph" in log, log


@pytest.mark.parametrize("way", ["graph", "bucket"])
def test_what_one_gpu_cannot_capture_none_launches(small: Path, way: str) -> None:
    failed, queued = trained(small, way), trained(small, "queued")
    for (mine, _), (theirs, _) in zip(failed, queued, strict=True):
        for name, values in theirs.items():
            np.testing.assert_array_equal(mine[name], values, err_msg=name)
    _, log = failed[0]
    assert any(mentions(line, "a micro-batch … not captured … rank 1") for line in log), log


def test_looked_up_rows_are_exchanged_in_place_of_tables(small: Path) -> None:
    """Of a table that is the output layer too and of another one, also where a rank has fewer samples or none."""
    folder = small / "tables"
    folder.mkdir()
    rows, queued, whole = (trained(folder, way, program=gpu_tables.__file__) for way in ("rows", "queued", "whole"))
    way = "by copies between the GPUs … of shared, other the ranks exchange the rows"
    assert any(mentions(line, way) for line in rows[0][1]), rows[0][1]
    assert any(mentions(line, "a micro-batch is captured as a CUDA graph") for line in rows[0][1]), rows[0][1]
    assert any(mentions(line, "by NCCL (planted)") for line in whole[0][1]), whole[0][1]
    for (mine, _), (again, _), (theirs, _) in zip(rows, queued, whole, strict=True):
        for name in mine:
            np.testing.assert_array_equal(mine[name], again[name], err_msg=name)
            np.testing.assert_array_equal(mine[name], rows[0][0][name], err_msg=f"{name} of the ranks")
        # Sums of the same halves, in another order; the output layer's part is not rounded to one.
        for name in ("losses", "norms"):
            np.testing.assert_allclose(mine[name], theirs[name], rtol=3e-3, err_msg=name)
