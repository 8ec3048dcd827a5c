"""A run that names a range of nodes: one is taken away in the middle of it, and given back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kubernetes_cluster import ENDS, PLACE, Cluster, Run, slow
from kubernetes_testbed import Space, Testbed, owner, wait_until
from project import Project, curve, evaluations, of_kind

SHAPE: dict[str, Any] = {
    "data__micro_batch": 2,
    "train__global_batch": 8,
    "train__steps": 40,
    "train__optimizer": {"name": "adamw", "lr": 1e-3, "weight_decay": 0.1},
    "train__schedule": {"name": "constant"},
    "checkpoint__every_steps": 4,
    "restart": {
        "failures": 0, "shrink_seconds": 3.0, "grow_seconds": 2.0, "backoff": {"first": 0.0, "limit": 0.0},
    },
}  # fmt: skip
NODES = {"nodes": 2, "min_nodes": 1, "ranks_per_node": 1, "cpus_per_rank": 1, "memory": "1Gi"}


@pytest.fixture(scope="module")
def without_dropout(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Dropout would draw other masks on another number of ranks."""
    folder = tmp_path_factory.mktemp("elastic")
    Project.make(folder, dropout=0.0)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return Project(folder)


@pytest.fixture(scope="module")
def undisturbed(without_dropout: Project) -> Path:
    """The same training by one rank on this machine."""
    return without_dropout.run("undisturbed", **SHAPE, resources={"ranks_per_node": 1})


def submitted(space: Space, project: Project, folder: Path, name: str, **place: Any) -> Run:
    """An elastic run on both nodes that has come to step 7.

    Its steps take 1.5 s in two attempts: the second has 50 s, in which the node must be there again.
    """
    cluster = Cluster.make(space, project, folder)
    changes = {**PLACE["backends__kubernetes"], "spread": "require", "namespace": space.name, **place}
    run = cluster.submit(name, **SHAPE, resources=NODES, backends__kubernetes=changes, **slow(cluster, 1.5, attempts=2))
    run.until_step(7)
    return run


def until_shrunk(run: Run, missing: str, timeout: float = ENDS) -> None:
    """Wait until the next attempt trains on one node, and a worker is reported as missing."""
    wait_until(lambda: len(run.records("start")) == 2, timeout, run.transcript)
    words = f"1 of 2 nodes: {missing} is missing"
    assert run.records("start")[1]["elastic"] == words
    wait_until(lambda: [r for r in of_kind(run.run_dir, "step") if r["attempt"] == 1], ENDS, run.transcript)
    status = run.status()
    assert (status["state"], status["ranks"]) == ("running", f"1, on {words}")


def same_after_growth(run: Run, undisturbed: Path, first: str) -> None:
    """The run ends on both nodes, with the curve of one rank; `first` is the outcome of its first attempt."""
    run.finish()
    starts, ends = run.records("start"), run.records("end")
    assert [(start["nodes"], start["world_size"]) for start in starts] == [(2, 2), (1, 1), (2, 2)], run.transcript()
    assert run.outcomes() == [first, "preempted", "finished"], run.transcript()
    assert "2 of 2 nodes are there again" in ends[1]["cause"]
    assert run.status()["failures"] == 0
    assert [event["gradient_accumulation"] for event in of_kind(run.run_dir, "elastic")] == [2, 4, 2]
    assert {event["samples"] for event in of_kind(run.run_dir, "step")} == {8}
    np.testing.assert_allclose(curve(run.run_dir), curve(undisturbed), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(evaluations(run.run_dir), evaluations(undisturbed), rtol=1e-5, atol=1e-6)


def test_a_node_is_drained_and_comes_back(
    space: Space, without_dropout: Project, undisturbed: Path, tmp_path: Path
) -> None:
    run = submitted(space, without_dropout, tmp_path, "elastic")
    launcher = owner(run.pods("launcher")[0])
    away = next(pod for pod in run.pods("worker") if owner(pod) != launcher)
    space.testbed.kubectl("cordon", owner(away))
    space.kubectl("delete", "pod", away["metadata"]["name"], "--wait=false")
    until_shrunk(run, away["metadata"]["name"])
    space.testbed.kubectl("uncordon", owner(away))
    same_after_growth(run, undisturbed, "preempted")


@pytest.mark.chaos
@pytest.mark.parametrize("which", ["worker", "launcher"])
def test_a_node_is_switched_off_and_comes_back(
    which: str, kubernetes_testbed: Testbed, space: Space, without_dropout: Project, undisturbed: Path, tmp_path: Path
) -> None:
    """Nothing says goodbye: its pods are there, and do not answer. With the launcher the run supervisor is lost."""
    supervised = {"supervisor": True} if which == "launcher" else {}
    run = submitted(space, without_dropout, tmp_path, f"off-{which}", **supervised)
    launcher = owner(run.pods("launcher")[0])
    lost = next(pod for pod in run.pods("worker") if (owner(pod) == launcher) == (which == "launcher"))
    kubernetes_testbed.node("off", owner(lost))
    until_shrunk(run, lost["metadata"]["name"], 2 * ENDS)
    kubernetes_testbed.node("on", owner(lost))
    same_after_growth(run, undisturbed, "lost")
