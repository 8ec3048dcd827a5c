"""What a person is told on a real cluster: of two MPIJobs, of a suspended run, of memory that was too little."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_cluster import ENDS, MOUNT, Cluster, same_end, slow
from kubernetes_testbed import Space, Testbed, wait_until
from messages import mentions


def status(cluster: Cluster, name: str) -> dict[str, Any]:
    """What `ortflow status` says of a run, by name or handle."""
    done = cluster.ortflow("status", name, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def jobs(cluster: Cluster, run: str) -> set[str]:
    """The MPIJobs of a run's name."""
    found = cluster.space.get("mpijobs", "-l", f"ortflow.dev/run={run}")["items"]
    return {one["metadata"]["name"] for one in found}


@pytest.mark.rotates("Kubernetes")
def test_two_mpijobs_of_one_name(cluster: Cluster) -> None:
    """One submitted, one applied; each handle is its own, and nobody's is cancelled with the other."""
    space = cluster.space
    first = cluster.submit("twin", backends__kubernetes__suspend=True)
    (one,) = jobs(cluster, "twin")
    cluster.write("twin", train__steps=7, backends__kubernetes__suspend=True)
    text = cluster.ortflow("render", "-b", "kubernetes", "twin.yaml").stdout
    space.kubectl("apply", "-f", "-", given=text)
    (two,) = jobs(cluster, "twin") - {one}
    handles = [f"kubernetes://{space.name}/{job}" for job in (one, two)]
    assert [status(cluster, handle)["job"] for handle in handles] == [one, two]
    assert status(cluster, "twin")["job"] == one
    listed = cluster.ortflow("list", "-b", "kubernetes").stdout
    assert one in listed
    assert two in listed
    done = cluster.ortflow("cancel", handles[0], timeout=120)
    assert done.returncode == 0, done.stderr
    assert jobs(cluster, "twin") == {two}, first.transcript()
    assert [status(cluster, name)["state"] for name in ("twin", handles[1])] == ["cancelled", "pending"]


@pytest.mark.rotates("Kubernetes")
def test_resume_starts_a_suspended_run(cluster: Cluster, left_alone: Path) -> None:
    """To the same end; with variables as they were written, and no probe in the workers' logs."""
    env = {"ODD": "$(HOME) $$(B) $"}
    changes = slow(cluster, 0.1)
    env |= changes.pop("backends__kubernetes__env")
    run = cluster.submit("held", backends__kubernetes__suspend=True, backends__kubernetes__env=env, **changes)
    wait_until(lambda: "is suspended; `ortflow resume" in str(run.status()["waits"]), 120, run.transcript)
    name = run.job()["metadata"]["name"]
    done = cluster.ortflow("resume", "held")
    assert done.returncode == 0, done.stderr
    run.until_step(2)
    space, worker = cluster.space, run.pod("worker")
    assert space.kubectl("exec", worker, "--", "printenv", "ODD") == env["ODD"]
    assert "kex_exchange" not in space.kubectl("logs", worker)
    run.finish()
    assert run.job()["metadata"]["name"] == name
    same_end(run.run_dir, left_alone)


def test_applied_by_hand(cluster: Cluster) -> None:
    """Before anything of it runs: known by its handle, which is told to who names the run, and in the list."""
    space = cluster.space
    cluster.write("by-hand", backends__kubernetes__suspend=True)
    text = cluster.ortflow("render", "-b", "kubernetes", "by-hand.yaml").stdout
    space.kubectl("apply", "-f", "-", given=text)
    (job,) = jobs(cluster, "by-hand")
    handle = f"kubernetes://{space.name}/{job}"
    assert handle in cluster.ortflow("status", "by-hand").stderr
    assert handle in cluster.ortflow("list", "-b", "kubernetes", "-A").stdout
    reported = status(cluster, handle)
    assert (reported["state"], reported["job"]) == ("pending", job)
    assert status(cluster, "by-hand")["state"] == "pending"


def test_a_run_that_the_operator_refuses(cluster: Cluster) -> None:
    """It is failed at every look, also when the event that says so is gone; and there is no log, for that reason."""
    space, testbed = cluster.space, cluster.space.testbed
    cluster.write("refused")
    documents = list(yaml.safe_load_all(cluster.ortflow("render", "-b", "kubernetes", "refused.yaml").stdout))
    mpijob = next(one for one in documents if one["kind"] == "MPIJob")
    mpijob["spec"]["runPolicy"]["cleanPodPolicy"] = "Sometimes"
    space.make_all(*documents)
    handle = f"kubernetes://{space.name}/{mpijob['metadata']['name']}"
    wait_until(lambda: status(cluster, handle)["state"] == "failed", 120, space.transcript)
    testbed.kubectl("-n", space.name, "delete", "events", "--all")
    looks = [status(cluster, name) for name in (handle, "refused", "refused")]
    assert [how["state"] for how in looks] == ["failed"] * 3
    assert all("the operator rejects the MPIJob" in how["cause"] for how in looks), looks
    done = cluster.ortflow("logs", handle)
    assert done.returncode == 2, done.stdout
    assert mentions(done.stderr, "refused", "failed", "the MPIJob")


@pytest.mark.rotates("Kubernetes")
def test_a_name_in_a_second_namespace(cluster: Cluster) -> None:
    """From the same folder: the run in the first one stays in sight."""
    first = cluster.submit("known", backends__kubernetes__suspend=True)
    (job,) = jobs(cluster, "known")
    other = Space.make(cluster.space.testbed, f"{cluster.space.name}-other")
    try:
        file = cluster.write("known", backends__kubernetes__namespace=other.name)
        done = cluster.ortflow("submit", "-b", "kubernetes", file.name)
        assert done.returncode == 2, done.stdout
        assert mentions(done.stderr, f"record … namespace {cluster.space.name}")
        assert not other.get("mpijobs")["items"]
    finally:
        other.remove()
    assert status(cluster, "known")["job"] == job
    assert job in cluster.ortflow("list", "-b", "kubernetes").stdout, first.transcript()


def test_prepare_without_memory(cluster: Cluster) -> None:
    """It is the launcher's memory that was too little, and no wrong input."""
    run = cluster.submit(
        "greedy",
        prepare=["python", "-c", "x = b'x' * (2 << 30); print(len(x))"],
        model__path="made-by-prepare.onnx",
        backends__kubernetes__launcher_resources={"memory": "512Mi"},
    )

    def output() -> bool:
        reported = run.status()
        assert reported["state"] != "failed", reported
        return "raise backends.kubernetes.launcher_resources.memory" in str(reported["waits"])

    wait_until(output, 120, lambda: f"{run.status()}{run.transcript()}")


@pytest.mark.chaos
def test_the_ssh_secret_is_replaced(cluster: Cluster) -> None:
    """The operator makes another key, which a new worker has before the launcher: no failure of the run."""
    run = cluster.submit("new-key", **slow(cluster, 0.5))
    run.until_step(4)
    space, job = cluster.space, run.job()["metadata"]["name"]
    old = space.get("secret", f"{job}-ssh")["data"]
    space.kubectl("delete", "secret", f"{job}-ssh")
    wait_until(
        lambda: space.testbed.ask("kubectl", "-n", space.name, "get", "secret", f"{job}-ssh").returncode == 0, 60
    )
    assert space.get("secret", f"{job}-ssh")["data"] != old
    space.kubectl("delete", "pod", run.pod("worker", 0), "--wait=false")
    run.finish(timeout=ENDS + 200)
    assert "failure" not in run.outcomes(), run.transcript()


@pytest.mark.chaos
def test_the_kind_of_mpijobs_is_deleted(kubernetes_testbed: Testbed, cluster: Cluster) -> None:
    """The run goes with it; `status` and `list` say why, and a submission that there is no operator."""
    run = cluster.submit("kindless", **slow(cluster, 0.5))
    run.until_step(5)
    kind = "crd/mpijobs.kubeflow.org"
    whole = kubernetes_testbed.get(kind)
    kubernetes_testbed.kubectl("delete", kind, "--wait=true", timeout=120)
    try:
        deleted = "the CRD mpijobs.kubeflow.org was deleted"
        wait_until(lambda: deleted in str(status(cluster, "kindless")), 120, lambda: str(status(cluster, "kindless")))
        assert status(cluster, "kindless")["state"] == "lost"
        assert "kindless" in cluster.ortflow("list", "-b", "kubernetes").stdout
        done = cluster.ortflow("resume", "kindless")
        assert done.returncode == 2, done.stdout
        assert "the cluster knows no MPIJobs: the mpi-operator" in done.stderr
    finally:
        made = {"metadata": {"name": whole["metadata"]["name"], "labels": whole["metadata"].get("labels") or {}}}
        restored = {**{key: whole[key] for key in ("apiVersion", "kind", "spec")}, **made}
        kubernetes_testbed.reported("kubectl", "create", "-f", "-", given=json.dumps(restored))
        # `kubectl wait` fails at once where there is no condition yet.
        established = ("kubectl", "wait", "--for=condition=Established", kind, "--timeout=5s")
        wait_until(lambda: kubernetes_testbed.ask(*established).returncode == 0, 120)
        kubernetes_testbed.service("kill", "operator")
        kubernetes_testbed.service("start", "operator")
    done = cluster.ortflow("resume", "kindless")
    assert done.returncode == 0, done.stderr
    run.finish(timeout=ENDS + 60)


@pytest.mark.chaos
def test_files_on_a_volume_of_another_user(cluster: Cluster, left_alone: Path) -> None:
    """Its root can be written through its group, as with fsGroup, and is owned by another user."""
    for part in ("model.onnx", "set"):
        (cluster.volume / "project" / part).rename(cluster.volume / part)
    os.chown(cluster.volume, 0, 1000)
    cluster.volume.chmod(0o2775)
    (cluster.folder / "note.txt").write_text("carried\n")
    run = cluster.run(
        "carried", backends__kubernetes__folder=MOUNT, backends__kubernetes__files=["note.txt"],
        prepare=["python", "-c", "assert open('note.txt').read() == 'carried\\n'"],
    )  # fmt: skip
    assert (cluster.volume / "note.txt").read_text() == "carried\n"
    assert cluster.volume.stat().st_uid == 0
    same_end(run.run_dir, left_alone)
