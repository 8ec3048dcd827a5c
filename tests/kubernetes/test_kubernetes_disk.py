"""A full volume on a real cluster: `status` says so from outside, and the run goes on once there is room."""

from __future__ import annotations

from pathlib import Path

import pytest
from kubernetes_bed import wait_until
from kubernetes_cluster import Cluster, same_end, slow
from kubernetes_disk import SmallDisk

pytestmark = pytest.mark.chaos


def test_a_launcher_pod_that_begins_on_a_full_volume(cluster: Cluster, small_disk: SmallDisk, left_alone: Path) -> None:
    """It waits for room: only the deleted pod has failed, and the run is not called running."""
    run = cluster.submit("full", **slow(cluster, 0.5))
    run.until_step(12)
    small_disk.fill()
    run.space.kubectl("delete", "pod", run.pod("launcher"), "--wait=false")

    def told() -> bool:
        small_disk.fill()  # ranks that save make room by letting older checkpoints go
        how = run.status()
        return how["state"] == "restarting" and "out of disk" in str(how["waits"]) and len(run.pods("launcher")) == 1

    wait_until(told, 90, lambda: f"{run.status()}{run.story()}")
    small_disk.free()
    run.finish()
    same_end(run.run_dir, left_alone)
    assert "out of disk" not in str(run.status()["waits"])
    job = run.space.get("job", f"{run.job()['metadata']['name']}-launcher")
    assert job["status"].get("failed", 0) <= 1, run.story()
