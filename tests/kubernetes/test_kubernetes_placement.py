"""Where pods land on a real cluster: launcher and workers apart, by tolerations and node selectors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kubernetes_bed import Bed, wait_until
from kubernetes_cluster import Cluster, Run

TAINTS = {"n1": "lasting=yes:NoSchedule", "n2": "spot=yes:NoSchedule"}


@pytest.fixture
def two_kinds(kubernetes_bed: Bed) -> Iterator[Bed]:
    """n1 is a lasting node and n2 a spot one, and each takes only who tolerates that."""
    for node, taint in TAINTS.items():
        kubernetes_bed.kubectl("taint", "node", node, taint)
        kubernetes_bed.kubectl("label", "node", node, f"kind={taint.partition('=')[0]}")
    yield kubernetes_bed
    for node, taint in TAINTS.items():
        kubernetes_bed.kubectl("taint", "node", node, f"{taint}-")
        kubernetes_bed.kubectl("label", "node", node, "kind-")


def tolerates(key: str) -> list[dict[str, str]]:
    return [{"key": key, "operator": "Exists", "effect": "NoSchedule"}]


def nodes(run: Run, component: str) -> set[str]:
    return {str(pod["spec"].get("nodeName", "")) for pod in run.pods(component)}


def test_launcher_and_workers_apart(two_kinds: Bed, cluster: Cluster) -> None:
    run = cluster.submit(
        "apart",
        train__steps=5,
        backends__kubernetes__supervisor=True,
        backends__kubernetes__worker_tolerations=tolerates("spot"),
        backends__kubernetes__launcher_tolerations=tolerates("lasting"),
    )
    wait_until(lambda: nodes(run, "launcher") == {"n1"}, 60, run.story)
    assert nodes(run, "worker") == {"n2"}
    assert nodes(run, "supervisor") == {"n1"}
    run.finish()


@pytest.mark.chaos
def test_a_worker_without_its_node_says_so(two_kinds: Bed, cluster: Cluster) -> None:
    """It tolerates both, and is for a kind of node that there is none of."""
    run = cluster.submit(
        "nowhere",
        backends__kubernetes__tolerations=[*tolerates("spot"), *tolerates("lasting")],
        backends__kubernetes__worker_node_selector={"kind": "other"},
        backends__kubernetes__launcher_node_selector={"kind": "lasting"},
    )
    wait_until(lambda: "finds no place" in str(run.status()["waits"]), 30, lambda: str(run.status()))
    assert nodes(run, "worker") == {""}
