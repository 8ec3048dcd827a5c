"""`ortflow tune` on a real Kubernetes: trials in parallel, each an MPIJob; killed in between, and continued."""

from __future__ import annotations

from typing import Any

import pytest
from kubernetes_cluster import Cluster, Run, slow
from kubernetes_testbed import wait_until
from project import evaluations
from searches import SEARCH, check_continued, killed_in_between

from ortflow.workflow.spec.file.load import load_run_file

pytest.importorskip("optuna", reason="Optuna is not installed")

SHAPE: dict[str, Any] = {
    "resources": {"nodes": 1, "ranks_per_node": 1, "cpus_per_rank": 1, "memory": "800Mi"},
}


def test_a_search_is_killed_and_continued(cluster: Cluster) -> None:
    file = cluster.write("search", **SEARCH, **SHAPE, **slow(cluster, 1.0))
    search = ("tune", "search.yaml", "--backend", "kubernetes", "--at-once", "2")
    runs = [Run(cluster, f"search-{number}") for number in range(3)]
    environment = cluster.space.testbed.environment
    killed_in_between(search, cluster.folder, environment, runs[0].steps)
    # One trial ends while no search follows it.
    wait_until(lambda: runs[0].status()["state"] == "finished", 120, runs[0].transcript)
    done = cluster.ortflow(*search, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [evaluations(run.run_dir)[-1][1] for run in runs]
    check_continued(done.stdout, losses, "kubernetes")
    assert [len(run.records("start")) for run in runs] == [1, 1, 1], "no trial is repeated"
    best = load_run_file(cluster.folder / "runs/search.sweep/best.yaml", files=False)
    written = load_run_file(file, files=False)
    assert best.model.path == written.model.path == "model.onnx", "a path on the volume stays as it is written"
