"""An elastic run on this machine: a simulated node is lost in the middle of it, and comes back."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from messages import mentions
from onnx import numpy_helper
from project import FEW_CORES, MPICH_SUMS, ORTFLOW, Project, command, curve, environment, evaluations, logs, of_kind

from ortflow.workflow.run.rundir import RunDir

pytestmark = pytest.mark.rotates

FAULTS = Path(__file__).parent.parent / "support" / "faults"
SHAPE: dict[str, Any] = {
    "data__micro_batch": 2, "train__global_batch": 12, "train__steps": 36, "checkpoint__every_steps": 4,
    "train__optimizer": {"name": "adamw", "lr": 1e-3, "weight_decay": 0.1}, "train__schedule": {"name": "constant"},
}  # fmt: skip
ELASTIC: dict[str, Any] = {
    "resources": {"nodes": 3, "min_nodes": 1, "cpus_per_rank": 1},
    "restart": {"failures": 0, "shrink_seconds": 0.5, "grow_seconds": 2.0, "backoff": {"first": 0.0, "limit": 0.0}},
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Without dropout, whose masks depend on the number of ranks."""
    return Project.make(tmp_path_factory.mktemp("elastic"), dropout=0.0)


@pytest.fixture(scope="module")
def undisturbed(project: Project) -> Path:
    return project.run("undisturbed", **SHAPE, resources__ranks_per_node=1)


def until(condition: Callable[[], Any], run_dir: Path, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, logs(run_dir)
        time.sleep(0.05)


def steps(run_dir: Path, attempt: int) -> int:
    path = run_dir / "events" / "rank-0000.jsonl"
    found = of_kind(run_dir, "step") if path.exists() else []
    return max((record["step"] for record in found if record["attempt"] == attempt), default=0)


def exported(run_dir: Path) -> dict[str, Any]:
    model = onnx.load(run_dir / "export" / "model.onnx")
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def same(run_dir: Path, undisturbed: Path) -> None:
    np.testing.assert_allclose(curve(run_dir), curve(undisturbed), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(evaluations(run_dir), evaluations(undisturbed), rtol=1e-5, atol=1e-6)
    here, there = exported(run_dir), exported(undisturbed)
    assert here.keys() == there.keys()
    for name, tensor in there.items():
        np.testing.assert_allclose(here[name], tensor, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("name", "changes", "ranks"),
    [
        pytest.param("data", {}, [3, 2, 3], id="data"),
        pytest.param("zero", {"parallel": {"zero": 2}}, [3, 2, 3], id="zero-2"),
        pytest.param("zero-3", {"parallel": {"zero": 3}}, [3, 2, 3], id="zero-3"),
        # Four ranks in two replicas, and the two ranks of one.
        *(
            pytest.param(
                degree,
                {"parallel": {degree: 2}, "resources": {"nodes": 4, "min_nodes": 2, "cpus_per_rank": 1}},
                [4, 2, 4],
                id=degree,
            )
            for degree in ("pipeline", "horizontal")
        ),
    ],
)
def test_a_node_is_lost_and_comes_back(
    name: str, changes: dict[str, Any], ranks: list[int], project: Project, undisturbed: Path
) -> None:
    replica = 2 if name in ("pipeline", "horizontal") else 1
    micro = 3 if replica == 2 else 2
    file = project.write(name, **{**SHAPE, **ELASTIC, **changes, "data__micro_batch": micro})
    sizes = [(count, 12 // (micro * count // replica)) for count in ranks]
    slow = environment(SLOW="0.2 2", PYTHONPATH=str(FAULTS), **(MPICH_SUMS if name == "data" else FEW_CORES))
    run_dir = project.run_dir(name)
    lost = RunDir(run_dir).lost_nodes
    with subprocess.Popen(
        [*ORTFLOW, "run", file.name], cwd=project.folder, env=slow, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as child:  # fmt: skip
        until(lambda: steps(run_dir, 0) >= 6, run_dir)
        lost.write_text("node2\n")
        until(lambda: steps(run_dir, 1), run_dir)
        said = command("status", name, folder=project.folder).stdout
        lost.unlink()
        out = child.communicate(timeout=200)[0]
    assert child.returncode == 0, f"{out}\n{logs(run_dir)}"
    records = RunDir(run_dir).read_attempts()
    starts, ends = ([r for r in records if r["event"] == event] for event in ("start", "end"))
    assert [start["world_size"] for start in starts] == ranks, out
    assert [end["outcome"] for end in ends] == ["lost", "preempted", "finished"]
    assert ends[0]["cause"] == "node2 is lost"
    nodes, shrunk, _ = ranks
    assert f"{shrunk} of {nodes} nodes: node2 is lost" in said
    assert mentions(out, f"{nodes} of {nodes} nodes … saving and restarting")
    seen = of_kind(run_dir, "elastic")
    assert [(event["world_size"], event["gradient_accumulation"]) for event in seen] == sizes
    same(run_dir, undisturbed)


def test_a_run_file_that_permits_no_smaller_number(project: Project) -> None:
    file = project.write("too-odd", **{**SHAPE, "data__micro_batch": 4}, resources={"nodes": 3, "min_nodes": 2})
    for words in (["validate"], ["run"]):
        done = command(*words, file.name, folder=project.folder)
        assert done.returncode == 2
        assert "resources.min_nodes" in done.stdout + done.stderr
        assert mentions(done.stdout + done.stderr, "2 ranks x 4 samples (data.micro_batch) … 12 samples")
    assert not project.run_dir("too-odd").exists()


def test_validate_names_the_numbers_that_are_skipped(project: Project) -> None:
    file = project.write("some", **{**SHAPE, "train__global_batch": 16}, resources={"nodes": 4, "min_nodes": 1})
    done = command("validate", file.name, folder=project.folder)
    assert done.returncode == 0, done.stderr
    assert "3 nodes will not be used" in done.stdout + done.stderr
