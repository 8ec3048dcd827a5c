"""GPUs on a real Kubernetes cluster whose nodes only advertise them: what pods get, and requests for too many."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes_cluster import PLACE, Cluster
from kubernetes_testbed import Testbed, wait_until
from messages import mentions

KIND = "NVIDIA-FAKE-1GB"
LABEL = "nvidia.com/gpu.product"
MIG = "nvidia.com/mig-1g.10gb"
PLACES = {"nvidia.com/gpu": "2", MIG: "1"}


@pytest.fixture
def gpus(kubernetes_testbed: Testbed) -> Iterator[Testbed]:
    """Each node advertises two GPUs and one slice of another; n1 has a label with the kind."""
    for node in ("n1", "n2"):
        _claim(kubernetes_testbed, node, "add")
    kubernetes_testbed.kubectl("label", "node", "n1", f"{LABEL}={KIND}")
    yield kubernetes_testbed
    kubernetes_testbed.kubectl("label", "node", "n1", f"{LABEL}-")
    for node in ("n1", "n2"):
        _claim(kubernetes_testbed, node, "remove")


def _claim(testbed: Testbed, node: str, what: str) -> None:
    def allocatable() -> Any:
        return testbed.get("node", node)["status"]["allocatable"]

    changes = [
        {"op": what, "path": f"/status/{part}/{name.replace('/', '~1')}", **({"value": count} if what == "add" else {})}
        for name, count in PLACES.items()
        for part in ("capacity", "allocatable")
    ]
    testbed.kubectl("patch", "node", node, "--subresource=status", "--type=json", "-p", json.dumps(changes))
    wait_until(lambda: ("nvidia.com/gpu" in allocatable()) == (what == "add"), 120, lambda: str(allocatable()))


def wanting(cluster: Cluster, ranks: int, nodes: int = 2, **wishes: Any) -> dict[str, Any]:
    """Changes to a run file: GPUs, a small /dev/shm, and no retry."""
    backend = {
        **PLACE["backends__kubernetes"], "namespace": cluster.space.name, "shared_memory": "96Mi", "spread": "prefer",
    }  # fmt: skip
    resources = {**PLACE["resources"], "nodes": nodes, "ranks_per_node": ranks, "gpus_per_rank": 1}
    for key, value in wishes.items():
        (resources if key in ("gpu_type",) else backend)[key] = value
    return {"resources": resources, "backends__kubernetes": backend, "restart": {"failures": 0}}


def test_pods_ask_for_gpus_and_have_shared_memory(gpus: Testbed, cluster: Cluster) -> None:
    """They are admitted and scheduled on nodes of the kind; the ranks report that this image has no CUDA."""
    run = cluster.submit("placed", **wanting(cluster, 2, nodes=1, gpu_type=KIND))
    wait_until(lambda: [pod["status"]["phase"] for pod in run.pods("worker")] == ["Running"], 120, run.transcript)
    (worker,) = run.pods("worker")
    assert worker["spec"]["nodeName"] == "n1"
    assert worker["spec"]["nodeSelector"] == {LABEL: KIND}
    assert worker["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "2"
    reported = cluster.space.kubectl("exec", worker["metadata"]["name"], "--", "df", "-k", "/dev/shm")
    assert reported.splitlines()[1].split()[:2] == ["tmpfs", str(96 << 10)], reported
    status = run.until_state("failed")
    assert "resources.gpus_per_rank: asks for GPUs, and onnxruntime" in status["cause"]
    launcher = next(iter(run.pods("launcher")))
    assert "nvidia.com/gpu" not in launcher["spec"]["containers"][0]["resources"].get("limits", {})
    assert launcher["spec"].get("nodeSelector") is None


def test_more_gpus_than_there_are(gpus: Testbed, cluster: Cluster) -> None:
    """The run waits, `status` reports for what, and the doctor reports it in advance."""
    changes = wanting(cluster, 3, nodes=1)
    file = cluster.write("too-many", **changes)
    doctor = cluster.ortflow("doctor", "--backend", "kubernetes", file.name)
    assert doctor.returncode == 1, doctor.stdout
    assert "2 with 2 of nvidia.com/gpu" in doctor.stdout
    run = cluster.submit("too-many", **changes)
    wait_until(lambda: "nvidia.com/gpu" in str(run.status()["waits"]), 120, lambda: str(run.status()))
    assert mentions(run.status()["waits"], "2 Insufficient nvidia.com/gpu … lower resources.ranks_per_node")
    assert cluster.ortflow("cancel", "too-many").returncode == 0


def test_another_kind_and_slices(gpus: Testbed, cluster: Cluster) -> None:
    file = cluster.write("of-another-kind", **wanting(cluster, 1, gpu_type="B200"))
    reported = cluster.ortflow("doctor", "--backend", "kubernetes", file.name)
    assert reported.returncode == 1
    assert f"2 without the label {LABEL}=B200" in reported.stdout, reported.stdout
    fits = cluster.write("slices", **wanting(cluster, 1, gpu={"resource": MIG}))
    assert f"{MIG} 1" in cluster.ortflow("doctor", "--backend", "kubernetes", fits.name).stdout
    wrong = cluster.write("shared-slices", **wanting(cluster, 2, gpu={"resource": MIG}))
    refused = cluster.ortflow("submit", "--backend", "kubernetes", wrong.name)
    assert refused.returncode == 2
    assert mentions(refused.stderr, f"gpu.resource: … {MIG} … first of 2")
