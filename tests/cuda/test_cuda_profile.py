"""The profile of a run on a GPU: it changes no loss, and its table adds up to the time of the steps."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest
from project import ORTFLOW, Project, curve, environment, logs

from ortflow.workflow.device.cudart import Runtime


@pytest.fixture(scope="module")
def project(cuda: Runtime, tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project.make(tmp_path_factory.mktemp("cuda-profile"), dropout=0.0)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_profile_on_a_gpu(project: Project, precision: str) -> None:
    settings: dict[str, Any] = {
        "resources__ranks_per_node": 1, "resources__gpus_per_rank": 1, "train__precision": precision,
        "train__steps": 30,
    }  # fmt: skip
    calm = project.run(f"calm-{precision}", **settings)
    run_dir = project.run(f"profile-{precision}", monitor__profile={"from": 10, "to": 19}, **settings)
    assert curve(run_dir) == curve(calm), logs(run_dir)
    printed = ""
    for arguments in (["profile", run_dir.name], ["profile", run_dir.name, "--json"]):
        done = subprocess.run(
            [*ORTFLOW, *arguments], cwd=project.folder, env=environment(), capture_output=True, text=True, check=False
        )
        printed += done.stdout
        assert done.returncode == 0, done.stderr
    numbers = json.loads(done.stdout)
    assert numbers["complete"]
    assert numbers["queued"]
    assert "the host queued them" in printed
    assert sum(row["seconds"] for row in numbers["operators"]) == pytest.approx(numbers["seconds"], rel=0.05)
    assert any(
        "Product" in row["name"] or "MatMul" in row["name"] or "Gemm" in row["name"] for row in numbers["operators"]
    )
