"""What a cluster's administrators add to a run: containers in its pods, user ids of a namespace, quotas, the node's
network."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from kubernetes_cluster import Cluster, same_end, slow
from kubernetes_testbed import Object, wait_until
from kubernetes_webhook import NAME, injecting
from messages import mentions

from ortflow.launchers.kubernetes.api import Cluster as Api
from ortflow.launchers.kubernetes.launcher import KubernetesLauncher
from ortflow.workflow.run.rundir import RunDir


def place(**changes: Any) -> dict[str, Any]:
    """Keys of backends.kubernetes beside the usual ones."""
    return {f"backends__kubernetes__{key}": value for key, value in changes.items()}


def running(run: Any, component: str) -> list[Object]:
    """The pods of a component whose own container runs."""
    return [
        pod
        for pod in run.pods(component)
        for one in pod["status"].get("containerStatuses", [])
        if one["name"] == component and "running" in one["state"]
    ]


def test_a_container_in_first_place(cluster: Cluster, left_alone: Path, tmp_path: Path) -> None:
    """As Istio's webhook puts it into launcher and workers; it never ends."""
    with injecting(cluster.space, tmp_path):
        run = cluster.submit("injected")
        how = run.until_state("finished")
        assert how["step"] == 40
        assert [pod["spec"]["containers"][0]["name"] for pod in run.pods("worker")] == [NAME, NAME]
        assert "40" in cluster.ortflow("logs", run.name).stdout
        wait_until(lambda: not running(run, "worker"), 120, run.transcript)
        assert not run.over()
        wait_until(lambda: NAME in (run.status()["waits"] or ""), 120, run.transcript)
        done = cluster.ortflow("supervise", run.name, timeout=90)
        assert done.returncode == 0, done.stdout + done.stderr
        run.finish(60)
    same_end(run.run_dir, left_alone)


@pytest.mark.rotates("Kubernetes")
def test_a_user_id_that_no_image_knows(cluster: Cluster, left_alone: Path) -> None:
    """Namespaces of OpenShift have a range of their own; their pods are in group 0."""
    user = 1000650000
    run = cluster.run("namespaced", **place(security={"run_as_user": user, "run_as_group": 0, "fs_group": user}))
    same_end(run.run_dir, left_alone)
    assert run.run_dir.stat().st_uid == user
    assert run.outcomes() == ["finished"]


@pytest.mark.rotates("Kubernetes")
def test_on_the_network_of_the_nodes(cluster: Cluster, left_alone: Path) -> None:
    """The overlay of docs/chart.md; a node has one such port, so each worker needs a node."""
    pod = {"template": {"spec": {"hostNetwork": True}}}
    overlay = [{"kind": "MPIJob", "patch": {"spec": {"mpiReplicaSpecs": {"Worker": pod}}}}]
    run = cluster.run("nodes", **place(overlay=overlay, spread="require"))
    same_end(run.run_dir, left_alone)
    assert run.outcomes() == ["finished"]


def test_a_quota_on_the_limits_of_cores(cluster: Cluster) -> None:
    """The doctor and the refusal name the key, and with it the run trains."""
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "q"},
        "spec": {"hard": {"limits.cpu": "9"}},
    }
    cluster.space.make_all(quota)
    wait_until(lambda: cluster.space.get("resourcequota", "q")["status"].get("hard"), 120)
    file = cluster.write("limited")
    key = "backends.kubernetes.launcher_resources.cpu_limit"
    done = cluster.ortflow("doctor", "-b", "kubernetes", file.name, "--json")
    found = [one for one in json.loads(done.stdout)["findings"] if one["about"] == "quota"]
    assert [(one["level"], one["fix"]) for one in found] == [("fault", f"give {key}")]
    done = cluster.ortflow("submit", "-b", "kubernetes", file.name)
    assert done.returncode == 2
    assert mentions(done.stderr, key, "limits.cpu for: launcher")
    run = cluster.submit("limited", f"{key}='1'")
    run.until_step(1)
    assert cluster.ortflow("cancel", "limited", "--now").returncode == 0


@pytest.mark.rotates("Kubernetes")
def test_an_mpijob_that_is_deleted_without_its_pods(cluster: Cluster) -> None:
    """The ranks train on, `status` says so, and `cancel` deletes what is left."""
    run = cluster.submit("orphaned", **slow(cluster, 1.0))
    run.until_step(2)
    job = run.job()["metadata"]["name"]
    run.space.kubectl("delete", "mpijob", job, "--cascade=orphan")
    how = run.status()
    assert how["state"] == "running"
    assert mentions(how["waits"], "3 pods", "`ortflow cancel`")
    done = cluster.ortflow("cancel", "orphaned")
    assert done.returncode == 0, done.stdout + done.stderr
    assert run.status()["state"] == "cancelled"
    wait_until(lambda: not run.space.get("pods,jobs")["items"], 120, run.transcript)
    assert run.outcomes() == ["preempted"], run.transcript()


def test_following_a_run_costs_few_requests(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A supervisor and `logs -f`, while the run trains: under five a minute each."""
    asked: list[str] = []
    send = Api._send

    def counted(self: Api, method: str, path: str, *rest: Any, **named: Any) -> Any:
        asked.append(path)
        return send(self, method, path, *rest, **named)

    run = cluster.submit("watched", **slow(cluster, 3.0))
    run.until_step(2)
    monkeypatch.setenv("KUBECONFIG", cluster.space.testbed.environment["KUBECONFIG"])
    monkeypatch.setattr(Api, "_send", counted)
    records, lines, messages = RunDir(cluster.folder / "runs/watched"), list[str](), list[str]()
    launcher = KubernetesLauncher()
    followers = [
        threading.Thread(target=launcher.supervise, args=(records, messages.append), daemon=True),
        threading.Thread(
            target=lambda: lines.extend(launcher.logs(records, attempt=None, rank=0, follow=True)), daemon=True
        ),
    ]
    for follower in followers:
        follower.start()
    wait_until(lambda: lines, 120, run.transcript)
    time.sleep(5)
    before, step = len(asked), run.steps()
    time.sleep(30)
    assert len(asked) - before < 2 * 5 * 30 / 60, asked[before:]
    assert run.steps() > step
    assert run.status()["step"] > step, "the records are copied meanwhile"
    cluster.ortflow("cancel", "watched", "--now")
    for follower in followers:
        follower.join(60)
        assert not follower.is_alive(), messages
    assert lines
