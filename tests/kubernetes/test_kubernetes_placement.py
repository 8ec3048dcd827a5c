"""Scheduling of pods on a real cluster: launcher and workers apart, by tolerations and node selectors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kubernetes_cluster import Cluster, Run
from kubernetes_testbed import Testbed, wait_until

TAINTS = {"n1": "lasting=yes:NoSchedule", "n2": "spot=yes:NoSchedule"}


@pytest.fixture
def two_kinds(kubernetes_testbed: Testbed) -> Iterator[Testbed]:
    """n1 is an on-demand node and n2 a spot node; each accepts only pods that tolerate its taint."""
    for node, taint in TAINTS.items():
        kubernetes_testbed.kubectl("taint", "node", node, taint)
        kubernetes_testbed.kubectl("label", "node", node, f"kind={taint.partition('=')[0]}")
    yield kubernetes_testbed
    for node, taint in TAINTS.items():
        kubernetes_testbed.kubectl("taint", "node", node, f"{taint}-")
        kubernetes_testbed.kubectl("label", "node", node, "kind-")


def tolerates(key: str) -> list[dict[str, str]]:
    return [{"key": key, "operator": "Exists", "effect": "NoSchedule"}]


def nodes(run: Run, component: str) -> set[str]:
    return {str(pod["spec"].get("nodeName", "")) for pod in run.pods(component)}


@pytest.mark.rotates("Kubernetes")
def test_launcher_and_workers_apart(two_kinds: Testbed, cluster: Cluster) -> None:
    run = cluster.submit(
        "apart",
        train__steps=5,
        backends__kubernetes__supervisor=True,
        backends__kubernetes__worker_tolerations=tolerates("spot"),
        backends__kubernetes__launcher_tolerations=tolerates("lasting"),
    )
    wait_until(lambda: nodes(run, "launcher") == {"n1"}, 120, run.transcript)
    assert nodes(run, "worker") == {"n2"}
    assert nodes(run, "supervisor") == {"n1"}
    run.finish()


@pytest.mark.chaos
def test_a_worker_without_its_node_is_reported(two_kinds: Testbed, cluster: Cluster) -> None:
    """It tolerates both, but selects a kind of node that does not exist."""
    run = cluster.submit(
        "nowhere",
        backends__kubernetes__tolerations=[*tolerates("spot"), *tolerates("lasting")],
        backends__kubernetes__worker_node_selector={"kind": "other"},
        backends__kubernetes__launcher_node_selector={"kind": "lasting"},
    )
    wait_until(lambda: "cannot be scheduled" in str(run.status()["waits"]), 120, lambda: str(run.status()))
    assert nodes(run, "worker") == {""}
