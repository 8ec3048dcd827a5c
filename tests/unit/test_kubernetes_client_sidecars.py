"""Containers that others put into a run's pods, in first place or beside ortflow's, and pods that a queue evicts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from kubernetes_objects import JOB, NOW, Object, pod, stamp
from messages import mentions
from test_kubernetes_client_reconciler import RUNNING, actions, over
from test_kubernetes_client_status import LAUNCHER, SUBMIT, WAITING, WORKERS, reported

from ortflow.launchers.kubernetes import objects
from ortflow.launchers.kubernetes.reasons import end_reason, reported_end
from ortflow.launchers.kubernetes.reconciler import Done, EndPod, Resubmit
from ortflow.launchers.records import Outcome, State

FINISHED = [*RUNNING, {"event": "end", "attempt": 0, "outcome": "finished", "next": "stop"}]
PROXY = {"name": "istio-proxy", "state": {"running": {}}, "ready": True}


def injected(pod: Object, state: Object | None = None, kind: str = "containerStatuses") -> Object:
    """The pod as Istio's webhook leaves it: its container is the first."""
    changed = copy.deepcopy(pod)
    if kind == "containerStatuses":
        changed["spec"]["containers"].insert(0, {"name": "istio-proxy", "image": "istio/proxyv2"})
        changed["spec"]["containers"][0]["resources"] = {"requests": {"cpu": "10m"}, "limits": {"cpu": "10m"}}
    if changed["status"]["containerStatuses"] or state:
        status = {**PROXY, "image": "istio/proxyv2", **({"state": state} if state else {})}
        changed["status"].setdefault(kind, []).insert(0, status)
    return changed


def ended(code: int, seconds: float = 60.0) -> Object:
    """A launcher pod whose own container has ended so long ago; the other runs."""
    terminated = {"exitCode": code, "message": "the cause", "finishedAt": stamp(NOW - seconds)}
    return injected(pod("launcher", state={"terminated": terminated}, ready=False))


@pytest.mark.parametrize(("pods", "view", "words"), [case[1:] for case in WAITING], ids=[case[0] for case in WAITING])
def test_a_container_in_first_place_changes_no_reason(pods: list[Object], view: dict[str, Any], words: str) -> None:
    assert words in (reported([SUBMIT], [*map(injected, pods)], **view).waits or "")


def test_the_container_of_the_role_is_read() -> None:
    launcher = injected(LAUNCHER)
    assert objects.container_name(launcher) == "launcher"
    assert reported(RUNNING, [*map(injected, WORKERS), launcher]).state is State.RUNNING
    assert reported_end(ended(2)) == (2, "the cause")
    requests = {"requests": {"cpu": "250m", "memory": "1Gi"}, "limits": {"memory": "1Gi"}}
    launcher["spec"]["containers"][1]["resources"] = requests
    assert not objects.holds_ranks(launcher)


@pytest.mark.parametrize("kind", ["containerStatuses", "initContainerStatuses"])
def test_another_container_that_keeps_a_pod_from_running(kind: str) -> None:
    pulling = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
    waiting = pod("worker", 0, phase="Pending", ready=False, state={"waiting": {"reason": "PodInitializing"}})
    how = reported([SUBMIT], [injected(waiting, pulling, kind)])
    assert mentions(how.waits or "", "worker 0", "istio-proxy", "cannot pull the image istio/proxyv2", "no such image")
    assert "backends.kubernetes.image" not in (how.waits or "")


def test_a_pod_that_a_container_outlives_is_ended() -> None:
    """Else its Job waits for it: a finished run keeps its workers, and a lost one is never tried again."""
    (found,) = actions(FINISHED, [*WORKERS, ended(0)])
    assert isinstance(found, EndPod)
    assert (found.phase, found.name) == ("Succeeded", f"{JOB}-launcher-xw9df")
    assert "istio-proxy" in found.why
    (found,) = actions(RUNNING, [*WORKERS, ended(75)])
    assert isinstance(found, EndPod)
    assert found.phase == "Failed"
    for pods in ([ended(0, seconds=2)], [injected(LAUNCHER)], [pod("launcher", phase="Succeeded")]):
        assert not [one for one in actions(RUNNING, [*WORKERS, *pods]) if isinstance(one, EndPod)]


def test_status_names_the_container_that_does_not_end() -> None:
    how = reported(FINISHED, [*WORKERS, ended(0)])
    assert how.state is State.FINISHED
    assert mentions(how.waits or "", "istio-proxy", "`ortflow supervise`", "`ortflow cancel`")
    assert reported(FINISHED, [*WORKERS, ended(0, seconds=2)]).waits is None
    assert reported(FINISHED, [*WORKERS, LAUNCHER]).waits is None
    how = reported(RUNNING, [*WORKERS, ended(75)])
    assert how.state is State.RESTARTING
    assert mentions(how.waits or "", "the cause", "istio-proxy", "`ortflow supervise`")


def test_an_eviction_by_kueue_is_a_preemption() -> None:
    """Its condition for a pod is its own, not Kubernetes' DisruptionTarget."""
    evicted = {"type": "TerminationTarget", "status": "True", "reason": "WorkloadEvictedDueToPreempted"}
    worker = pod("worker", 1, deleted=NOW + 30, conditions=[evicted])
    assert end_reason(worker) == "preempted in its queue"
    assert "preempted in its queue" in (reported(RUNNING, [pod("worker", 0), worker, LAUNCHER]).waits or "")
    launcher = pod("launcher", phase="Failed", conditions=[evicted])
    (found,) = actions([*RUNNING, SUBMIT, SUBMIT, SUBMIT], [launcher], mpijob=over())
    assert isinstance(found, Resubmit), "a failure would have spent the budget"
    other = pod("launcher", phase="Failed")
    (found,) = actions([*RUNNING, *({**SUBMIT, "job": f"j{n}"} for n in range(4))], [other], mpijob=over())
    assert isinstance(found, Done)
    assert found.outcome is Outcome.FAILURE
