"""How many requests following a run costs the API server while nothing happens in it."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from fake_clock import FakeClock
from fake_kubernetes import FakeCluster
from kubernetes_objects import JOB, NAMESPACE, NOW, RUN, Object, batch_job, mpijob, pod, stamp
from test_kubernetes_client_launcher import directory, fake, finish, job_of, start, submit
from waits import PATIENCE, wait_until

from ortflow.launchers.kubernetes import changes
from ortflow.launchers.kubernetes.changes import is_calm
from ortflow.launchers.kubernetes.cluster_objects import ClusterObjects
from ortflow.launchers.kubernetes.contexts import connect
from ortflow.launchers.kubernetes.launcher import KubernetesLauncher
from ortflow.launchers.kubernetes.place import Place
from ortflow.launchers.kubernetes.snapshot import View
from ortflow.launchers.kubernetes.supervise import SupervisedRun, supervise
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.spec.restart import Restart

__all__ = ["fake"]
QUIET_SECONDS = 3.0
WORKERS = [pod("worker", 0), pod("worker", 1)]


@pytest.mark.parametrize(
    ("pods", "calm"),
    [
        ([*WORKERS, pod("launcher")], True),
        ([*WORKERS, pod("launcher", 0, phase="Failed"), pod("launcher", 1)], True),
        ([*WORKERS], False),
        ([pod("worker", 0), pod("launcher")], False),
        ([pod("worker", 0), pod("worker", 1, ready=False), pod("launcher")], False),
        ([pod("worker", 0), pod("worker", 1, deleted=NOW + 5), pod("launcher")], False),
        ([pod("worker", 0), pod("worker", 1, phase="Failed"), pod("launcher")], False),
        ([*WORKERS, pod("launcher", phase="Pending", ready=False)], False),
    ],
)
def test_a_run_is_calm_if_all_its_pods_work(pods: list[Object], calm: bool) -> None:
    assert is_calm(View(mpijob(), NOW, batch_job(), pods)) is calm
    assert not is_calm(View(mpijob(completionTime=stamp(NOW)), NOW, batch_job(), pods))
    assert not is_calm(View(None, NOW, None, pods))


def test_a_supervisor_waits_for_a_change(tmp_path: Path, fake: FakeCluster) -> None:
    """It asks once, and acts as soon as a pod changes."""
    run, clock, messages = RunDir(tmp_path / "run"), FakeClock(), list[str]()
    for event in ("submit", "start"):
        run.record_attempt(event=event, launcher="kubernetes", job=JOB, attempt=0)
    fake.add(mpijob(now=NOW), batch_job(), *WORKERS, pod("launcher"))
    charge, cluster = SupervisedRun(run, Place(NAMESPACE, RUN, JOB), Restart()), connect()
    thread = threading.Thread(target=supervise, args=(charge, cluster, messages.append, clock), daemon=True)
    thread.start()
    wait_until(lambda: ("watch", "true") in [pair for *_, query in fake.asked for pair in query.items()])
    before = len(fake.asked)
    assert before <= 5
    time.sleep(QUIET_SECONDS)
    assert len(fake.asked) == before
    assert clock.sleeps == []
    fake.add(pod("worker", 0, phase="Failed"))
    wait_until(lambda: any("deleting dead pod" in text for text in messages))
    fake.remove("mpijobs", JOB)
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_without_the_right_to_watch_it_asks_as_before(
    tmp_path: Path, fake: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.add(mpijob(now=NOW), batch_job(), *WORKERS, pod("launcher"))
    clock, cluster = FakeClock(), connect()
    fake.refuse = lambda method, plural, body: "forbidden_list" if plural == "pods" else None
    view = View(mpijob(), NOW, batch_job(), [*WORKERS, pod("launcher")])
    changes.wait(view, cluster, NAMESPACE, 3.0, clock)
    assert clock.sleeps == [3.0]


def test_listing_many_runs_takes_time_with_their_number(fake: FakeCluster) -> None:
    """Each run's pods were searched among those of all runs."""

    def seconds(count: int) -> float:
        found = [mpijob(now=NOW, name=f"r{n}-abc123") for n in range(count)]
        pods = [pod(role, index) for _ in found for role, index in (("launcher", 0), ("worker", 0), ("worker", 1))]
        for n, job in enumerate(found):
            job["metadata"]["labels"]["ortflow.dev/run"] = f"r{n}"
            for one in pods[3 * n : 3 * n + 3]:
                one["metadata"]["labels"]["ortflow.dev/job"] = f"r{n}-abc123"
        places = [Place(NAMESPACE, f"r{n}", f"r{n}-abc123") for n in range(0, count, 2)]
        cluster = connect()
        cluster.find_all = lambda kind, **given: {"MPIJob": found, "Pod": pods}.get(kind, [])  # type: ignore[method-assign]
        gathered = ClusterObjects.gather(cluster, NAMESPACE)
        begun = time.process_time()
        views = gathered.unknown_runs(places)
        assert [len(view.pods) for view in views] == [3] * (count // 2)
        return time.process_time() - begun

    seconds(10)
    least = {count: min(seconds(count) for _ in range(3)) for count in (400, 1600)}
    assert least[1600] < 12 * max(least[400], 0.005)


def test_a_followed_log_costs_one_request(tmp_path: Path, fake: FakeCluster) -> None:
    submit(tmp_path)
    job, run, launcher = job_of(tmp_path), directory(tmp_path), KubernetesLauncher()
    name = start(fake, job)
    lines: list[Any] = []
    follower = threading.Thread(target=lambda: lines.extend(launcher.logs(run, attempt=None, rank=0, follow=True)))
    follower.start()
    wait_until(lambda: any(query.get("follow") for *_, query in fake.asked))
    before = len(fake.asked)
    fake.say(name, "[0] while nobody asks")
    wait_until(lambda: run.log(0, 0).exists() and "while nobody asks" in run.log(0, 0).read_text())
    time.sleep(QUIET_SECONDS)
    assert len(fake.asked) == before
    finish(fake, job, name)
    follower.join(PATIENCE)
    assert not follower.is_alive()
    assert lines == ["hello", "while nobody asks", "goodbye"]
