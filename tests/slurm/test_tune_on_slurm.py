"""`ortflow tune` on a real Slurm: trials in parallel, each a job; killed in between, and continued."""

from __future__ import annotations

from typing import Any

import pytest
from cluster import Cluster, Run, slow
from project import evaluations
from searches import SEARCH, check_continued, killed_in_between
from testbed import wait_until

pytest.importorskip("optuna", reason="Optuna is not installed")

SHAPE: dict[str, Any] = {
    "resources": {"cpus_per_rank": 1, "memory": "800Mi"},
    "backends__slurm__mpi": "pmi2",
}


def test_a_search_is_killed_and_continued(cluster_of: Cluster) -> None:
    cluster_of.write("search", **SEARCH, **SHAPE, **slow(1.0))
    search = ("tune", "search.yaml", "--backend", "slurm", "--at-once", "2")
    runs = [Run(cluster_of, f"search-{number}") for number in range(3)]
    folder, environment = cluster_of.project.folder, cluster_of.testbed.environment
    killed_in_between(search, folder, environment, runs[0].steps)
    # One trial ends while no search follows it.
    wait_until(lambda: runs[0].status()["state"] == "finished", 120, runs[0].transcript)
    done = cluster_of.ortflow(*search, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [evaluations(run.run_dir)[-1][1] for run in runs]
    check_continued(done.stdout, losses, "slurm")
    assert [len(run.records("submit")) for run in runs] == [1, 1, 1], "no trial is repeated"
    checked = cluster_of.ortflow("validate", "runs/search.sweep/best.yaml")
    assert checked.returncode == 0, checked.stderr
