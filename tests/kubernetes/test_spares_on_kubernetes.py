"""A node of a real Kubernetes is really slow: a worker in reserve, on the other node, takes its worker's place."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from kubernetes_cluster import MOUNT, PLACE, Cluster
from messages import mentions
from project import FEW_CORES, of_kind

SLOW = Path(__file__).parents[1] / "support" / "slow_node"
SHAPE: dict[str, Any] = {
    "train__steps": 6,
    "preflight": True,
    "resources": {"nodes": 2, "spares": 2, "ranks_per_node": 1, "cpus_per_rank": 1, "memory": "1Gi"},
    "restart": {"failures": 0, "backoff": {"first": 0.0, "limit": 0.0}},
}


@pytest.mark.rotates("Kubernetes")
def test_a_slow_node_is_replaced_without_spares(cluster: Cluster) -> None:
    """The supervisor in the cluster has the worker of the slow node created on another one."""
    shutil.copytree(SLOW, cluster.volume / "slow_node")
    variables = {**FEW_CORES, "PYTHONPATH": f"{MOUNT}/slow_node", "SLOW_NODE": "n2"}
    given = PLACE["backends__kubernetes"]
    place = {**given, "namespace": cluster.space.name, "spread": "prefer", "env": variables, "supervisor": True}
    shape = {**SHAPE, "resources": {**SHAPE["resources"], "spares": 0}}
    run = cluster.submit("moved", **shape, backends__kubernetes=place)
    run.finish()
    first, second = run.records("end")
    assert list(first["excludes"]) == ["n2"], run.transcript()
    assert second["outcome"] == "finished"
    nodes = [event["node"] for rank in range(2) for event in of_kind(run.run_dir, "attempt_start", rank)]
    assert sorted(nodes) == ["n1", "n1", "n1", "n2"], "both workers of the second attempt"


# The first two workers that are ready make the first attempt. If both are on n2, nothing is compared.
@pytest.mark.chaos
def test_a_slow_node_is_replaced(cluster: Cluster) -> None:
    shutil.copytree(SLOW, cluster.volume / "slow_node")
    variables = {**FEW_CORES, "PYTHONPATH": f"{MOUNT}/slow_node", "SLOW_NODE": "n2"}
    place = {**PLACE["backends__kubernetes"], "namespace": cluster.space.name, "spread": "require", "env": variables}
    run = cluster.submit("slow", **SHAPE, backends__kubernetes=place)
    run.finish()
    first, second = run.records("end")
    assert mentions(first["cause"], "preflight: node n2 … of its peers' median"), run.transcript()
    assert list(first["excludes"]) == ["n2"]
    assert first["counts"] is False
    assert second["outcome"] == "finished"
    nodes = [event["node"] for rank in range(2) for event in of_kind(run.run_dir, "attempt_start", rank)]
    assert sorted(nodes) == ["n1", "n1", "n1", "n2"], "two workers of the node that is not slow"
    assert mentions(run.records("start")[1]["elastic"], "all 2 nodes … excluded")
