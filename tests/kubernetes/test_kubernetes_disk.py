"""A full volume on a real cluster: `status` reports it from outside, and the run continues once there is space."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from kubernetes_cluster import ENDS, Cluster, same_end, slow
from kubernetes_disk import SIZE, SmallDisk
from kubernetes_testbed import wait_until

LACK = re.compile(r"out of disk on /ortflow\S*, [\d.]+ MB needed")


@pytest.mark.rotates("Kubernetes")
def test_a_volume_that_is_full_in_the_middle(cluster: Cluster, small_disk: SmallDisk, left_alone: Path) -> None:
    """Ranks wait for room: no attempt ends, and `status` and `list` name what is lacking."""
    run = cluster.submit("middle", **slow(cluster, 0.1))
    run.until_step(7)

    def reported() -> bool:
        small_disk.fill()  # ranks that were saving make room by letting older checkpoints go
        return LACK.search(str(run.status()["waits"])) is not None

    wait_until(reported, 120, lambda: f"{run.status()}{run.transcript()}")
    assert run.status()["state"] == "running"
    assert LACK.search(" ".join(cluster.ortflow("list", "-b", "kubernetes").stdout.split()))
    small_disk.free()
    run.finish()
    same_end(run.run_dir, left_alone)
    assert run.outcomes() == ["finished"], run.transcript()
    assert run.status()["waits"] is None


@pytest.mark.chaos
def test_a_quota_that_is_used_up(cluster: Cluster, small_quota: SmallDisk, left_alone: Path) -> None:
    """EDQUOT in the pods is a full disk: the ranks wait, `status` says so, and nothing is lost."""
    run = cluster.submit("quota", **slow(cluster, 0.1))
    run.until_step(7)

    def reported() -> bool:
        small_quota.fill()
        return LACK.search(str(run.status()["waits"])) is not None

    wait_until(reported, 120, lambda: f"{run.status()}{run.transcript()}")
    assert shutil.disk_usage(small_quota.folder).free > 10 * SIZE, "the file system itself has room"
    assert run.status()["state"] == "running"
    small_quota.free()
    run.finish()
    same_end(run.run_dir, left_alone)
    assert run.outcomes() == ["finished"], run.transcript()
    assert run.status()["waits"] is None


@pytest.mark.chaos
def test_the_wait_for_room_runs_out(cluster: Cluster, small_disk: SmallDisk, left_alone: Path) -> None:
    """After the stated time, in each of the operator's tries; resumed once there is room."""
    limits = {"checkpoint__wait_for_room": 4.0, "backends__kubernetes__backoff_limit": 1}
    run = cluster.submit("too-long", **slow(cluster, 0.2), **limits)
    run.until_step(7)
    wait_until(lambda: (small_disk.fill(), run.over())[1], ENDS, run.transcript)
    how = run.status()
    assert how["state"] == "lost", how
    assert "out of disk on" in how["cause"], how
    assert "waiting 4 s for room" in cluster.folder.joinpath("runs/too-long/logs/launcher.log").read_text()
    small_disk.free()
    done = cluster.ortflow("resume", "too-long")
    assert done.returncode == 0, done.stderr
    run.finish()
    same_end(run.run_dir, left_alone)
    assert how["failures"] == run.status()["failures"] == 0, "a full disk is no failure of the run"


@pytest.mark.chaos
def test_a_launcher_pod_that_begins_on_a_full_volume(cluster: Cluster, small_disk: SmallDisk, left_alone: Path) -> None:
    """It waits for space: only the deleted pod has failed, and the run is not reported as running."""
    run = cluster.submit("full", **slow(cluster, 0.5))
    run.until_step(12)
    small_disk.fill()
    run.space.kubectl("delete", "pod", run.pod("launcher"), "--wait=false")

    def reported() -> bool:
        small_disk.fill()  # ranks that save free space by deleting older checkpoints
        how = run.status()
        return how["state"] == "restarting" and "out of disk" in str(how["waits"]) and len(run.pods("launcher")) == 1

    wait_until(reported, 120, lambda: f"{run.status()}{run.transcript()}")
    small_disk.free()
    run.finish()
    same_end(run.run_dir, left_alone)
    assert "out of disk" not in str(run.status()["waits"])
    job = run.space.get("job", f"{run.job()['metadata']['name']}-launcher")
    assert job["status"].get("failed", 0) <= 1, run.transcript()
