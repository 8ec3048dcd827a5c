"""What a person is told on a real cluster: of two MPIJobs, of a suspended run, of memory that was too little."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kubernetes_bed import wait_until
from kubernetes_cluster import ENDS, Cluster, same_end, slow


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
    assert jobs(cluster, "twin") == {two}, first.story()
    assert [status(cluster, name)["state"] for name in ("twin", handles[1])] == ["cancelled", "pending"]


def test_resume_starts_a_suspended_run(cluster: Cluster, left_alone: Path) -> None:
    """To the same end; with variables as they were written, and no probe in the workers' logs."""
    env = {"ODD": "$(HOME) $$(B) $"}
    changes = slow(cluster, 0.1)
    env |= changes.pop("backends__kubernetes__env")
    run = cluster.submit("held", backends__kubernetes__suspend=True, backends__kubernetes__env=env, **changes)
    wait_until(lambda: "is suspended; `ortflow resume" in str(run.status()["waits"]), 30, run.story)
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
    told = status(cluster, handle)
    assert (told["state"], told["job"]) == ("pending", job)
    assert status(cluster, "by-hand")["state"] == "pending"


def test_prepare_without_memory(cluster: Cluster) -> None:
    """It is the launcher's memory that was too little, and no wrong input."""
    run = cluster.submit(
        "greedy",
        prepare=["python", "-c", "x = b'x' * (2 << 30); print(len(x))"],
        model__path="made-by-prepare.onnx",
        backends__kubernetes__launcher_resources={"memory": "512Mi"},
    )

    def said() -> bool:
        told = run.status()
        assert told["state"] != "failed", told
        return "raise backends.kubernetes.launcher_resources.memory" in str(told["waits"])

    wait_until(said, 90, lambda: f"{run.status()}{run.story()}")


@pytest.mark.chaos
def test_the_ssh_secret_is_replaced(cluster: Cluster) -> None:
    """The operator makes another key, which a new worker has before the launcher: no failure of the run."""
    run = cluster.submit("new-key", **slow(cluster, 0.5))
    run.until_step(4)
    space, job = cluster.space, run.job()["metadata"]["name"]
    old = space.get("secret", f"{job}-ssh")["data"]
    space.kubectl("delete", "secret", f"{job}-ssh")
    wait_until(lambda: space.bed.ask("kubectl", "-n", space.name, "get", "secret", f"{job}-ssh").returncode == 0, 60)
    assert space.get("secret", f"{job}-ssh")["data"] != old
    space.kubectl("delete", "pod", run.pod("worker", 0), "--wait=false")
    run.finish(timeout=ENDS + 200)
    assert "failure" not in run.outcomes(), run.story()
