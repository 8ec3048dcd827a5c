"""The status of a run on Kubernetes, from its record directory and the cluster. Pure.

The run's own records take precedence; only the cluster knows why it waits, where it runs, and what happened to
pods that ended without a report. A Failed condition is not the end: only `status.completionTime` is.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from ortflow.launchers.kubernetes import avoidance, objects
from ortflow.launchers.kubernetes.api import Object
from ortflow.launchers.kubernetes.reasons import end_reason, fault_of, reported_end
from ortflow.launchers.kubernetes.snapshot import View
from ortflow.launchers.records import State, elastic_nodes, open_attempt, state
from ortflow.launchers.status import RunStatus
from ortflow.workflow.errors import EXIT_USER

SILENCE = 15.0
"""Seconds in which a running operator has processed a new MPIJob."""
UNREAD = (
    "finished; the log of its launcher pod was deleted before all of it was read (backends.kubernetes.time_to_live), "
    "so that steps, losses and logs are only in the run directory on the volume"
)
VALIDATION = "ValidationError"
"""Reason of the event with which the operator rejects an MPIJob."""


def is_settled(records: Sequence[dict[str, Any]]) -> bool:
    """Whether the records alone show how the run ended."""
    return bool(records) and not state(records, alive=True).active


def status(
    run_status: RunStatus, records: Sequence[dict[str, Any]], view: View, *, silent: Collection[str] = (),
    unread: Collection[str] = (),
) -> RunStatus:  # fmt: skip
    """The run's status; `run_status` is the status from its records.

    `silent`: uids of launcher pods that have not reported the run's attempts: an attempt that the records show as
    running is then an earlier pod's. `unread`: uids of those whose log cannot be read.
    """
    run_status = replace(run_status, launcher="kubernetes")
    if is_settled(records):
        return replace(run_status, waits=_held_pods(view))
    if view.mpijob is None and (orphans := orphaned(view)):
        pods_text = f"its {len(orphans)} pod{'s' if len(orphans) > 1 else ''}"
        return replace(
            run_status, waits=f"its MPIJob was deleted without {pods_text}: `ortflow cancel` deletes what is left"
        )
    if view.mpijob is None:
        return replace(run_status, state=State.LOST, phase=None, cause=view.gone) if view.gone else _gone(run_status)
    run_status = replace(run_status, job=view.name, job_restarts=_retries(view))
    if objects.deleted_at(view.mpijob) is not None:
        return replace(run_status, waits="it is being deleted: ranks save and exit")
    if objects.over(view.mpijob):
        return _over(run_status, records, view)
    if (error := refused(view)) is not None:
        return replace(run_status, state=State.FAILED, cause=f"the operator rejects the MPIJob: {error}", phase=None)
    if (reason := given_up(view, records)) is not None:
        return replace(run_status, state=State.FAILED, cause=reason, phase=None)
    if (reason := held(view)) is not None:
        return _idle(run_status, reason)
    return _at_work(run_status, records, view, silent, unread)


def orphaned(view: View) -> list[Object]:
    """The pods that go on without their MPIJob: `kubectl delete --cascade=orphan` leaves them.

    Those that are about to be deleted with it still name it as their owner.
    """
    alive = [pod for pod in view.pods if not objects.has_ended(pod) and objects.deleted_at(pod) is None]
    owned = all(pod["metadata"].get("ownerReferences") for pod in objects.of_role(alive, "worker"))
    return [] if view.mpijob is not None or owned else alive


def _held_pods(view: View) -> str | None:
    """The note of a run that has ended while a container beside its launcher has not; None if all is well."""
    if view.mpijob is None or objects.over(view.mpijob) or objects.deleted_at(view.mpijob) is not None:
        return None
    launchers = objects.of_role(view.pods, "launcher")
    names = objects.outlived_by(launchers[-1]) if launchers else []
    if not names or view.now < objects.ended_at(launchers[-1]) + SILENCE:
        return None
    return (
        f"its container {', '.join(names)} does not end, which holds the pods of the run: `ortflow supervise` or "
        "`ortflow cancel` ends them"
    )


def refused(view: View) -> str | None:
    """The operator's reason for rejecting the MPIJob, which it will never process."""
    for event in reversed(objects.events_of(view.events, view.name, warnings=True)):
        if event.get("reason") == VALIDATION:
            return " ".join(str(event.get("message") or "").split()).removeprefix("Found validation errors: ")
    return None


def given_up(view: View, records: Sequence[dict[str, Any]]) -> str | None:
    """The message of the newest ended launcher pod if it ended because of wrong input.

    The operator starts others, which fail in the same way, until one begins an attempt.
    """
    ended = [pod for pod in objects.of_role(view.pods, "launcher") if objects.has_ended(pod)]
    if not ended or _has_started(records):
        return None
    code, reason = reported_end(ended[-1])
    return (reason or "the launcher pod ended with exit code 2") if code == EXIT_USER else None


def _has_started(records: Sequence[dict[str, Any]]) -> bool:
    """Whether the newest submission has started an attempt."""
    for record in reversed(records):
        if record.get("event") in ("start", "submit"):
            return bool(record["event"] == "start")
    return False


def held(view: View) -> str | None:
    """Why it must not start: suspended by a user, or by a queue without quota for it."""
    assert view.mpijob is not None
    if suspended(view):
        namespace = view.mpijob["metadata"].get("namespace")
        return f"it is suspended; `ortflow resume kubernetes://{namespace}/{view.name}` starts it"
    queue = objects.label(view.mpijob, objects.QUEUE)
    if not queue or not _policy(view.mpijob).get("suspend"):
        return None
    for kind in ("Evicted", "QuotaReserved", "Admitted"):
        entry = objects.condition(view.workload, kind)
        wrong = "True" if kind == "Evicted" else "False"
        if entry is not None and entry.get("status") == wrong and entry.get("message"):
            return f"waits for quota in queue {queue}: {entry['message']}"
    return f"waits for quota in queue {queue}"


def suspended(view: View) -> bool:
    """Whether it is suspended until a user resumes it."""
    if view.mpijob is None or objects.over(view.mpijob) or objects.label(view.mpijob, objects.QUEUE):
        return False
    return bool(_policy(view.mpijob).get("suspend"))


def _policy(mpijob: Object) -> Object:
    return (mpijob.get("spec") or {}).get("runPolicy") or {}


def _gone(run_status: RunStatus) -> RunStatus:
    if run_status.job is None and run_status.attempts == 0 and run_status.state is not State.PENDING:
        return replace(run_status, state=State.LOST, cause=run_status.cause or "it was never submitted")
    job_text = f"MPIJob {run_status.job}" if run_status.job else "its MPIJob"
    return replace(run_status, state=State.CANCELLED, phase=None, cause=f"{job_text} no longer exists: it was deleted")


def _over(run_status: RunStatus, records: Sequence[dict[str, Any]], view: View) -> RunStatus:
    """The operator has finished it, and the records do not show how it ended."""
    if objects.holds(view.mpijob, "Succeeded"):
        # The launcher pod ends with 0 only where the run directory says so.
        # Earlier ends say nothing about the last attempt, whose own end may have been lost with its pod's log.
        read = any(objects.of_role(view.pods, "launcher"))
        return replace(run_status, state=State.FINISHED, phase=None, cause="finished" if read else UNREAD, why=None)
    failed = objects.condition(view.mpijob, "Failed") or {}
    return replace(run_status, state=State.LOST, phase=None, cause=_end_of(view, failed))


def _end_of(view: View, failed: Object) -> str:
    reason = str(failed.get("reason") or "")
    if "DeadlineExceeded" in reason or "DeadlineExceeded" in str(_job_failure(view).get("reason")):
        return "its deadline has passed; `ortflow resume` continues the run; raise backends.kubernetes.deadline"
    pods = objects.of_role(view.pods, "launcher")
    last = f"; its last launcher pod: {end_reason(pods[-1])}" if pods else ""
    message = " ".join(str(failed.get("message") or "").split())
    return f"the operator gave up ({message or reason or 'no reason given'}){last}"


def _job_failure(view: View) -> Object:
    return objects.condition(view.job, "Failed") or {}


def _idle(run_status: RunStatus, reason: str) -> RunStatus:
    """Status of a run without a running pod."""
    now = State.PENDING if run_status.state is State.PENDING else State.RESTARTING
    return replace(run_status, state=now, phase=None, seconds_left=None, waits=reason)


def _at_work(
    run_status: RunStatus,
    records: Sequence[dict[str, Any]],
    view: View,
    silent: Collection[str],
    unread: Collection[str],
) -> RunStatus:
    assert view.mpijob is not None
    workers = objects.of_role(view.pods, "worker")
    launchers = objects.of_role(view.pods, "launcher")
    alive = [pod for pod in launchers if not objects.has_ended(pod) and objects.deleted_at(pod) is None]
    nodes = sorted(
        {str(pod["spec"]["nodeName"]) for pod in workers or alive if (pod.get("spec") or {}).get("nodeName")}
    )
    run_status = replace(run_status, nodes=", ".join(nodes) or None)
    if not (view.mpijob.get("status") or {}).get("conditions"):
        # It also has none if the operator could not create the first pod.
        return _idle(run_status, _nothing_made(view) or _untouched(view))
    worker_count = objects.workers_wanted(view.mpijob)
    running = bool(alive) and objects.has_begun(alive[-1])
    cut = _cut_off(alive[-1]) if running and objects.uid(alive[-1]) in unread else None
    if open_attempt(records) is not None and running and objects.uid(alive[-1]) not in silent:
        names = elastic_nodes(records)
        taking_part = workers if names is None else [pod for pod in workers if objects.name(pod) in names]
        required_count = worker_count if names is None else sum("-worker-" in name for name in names)
        if (reason := _missing(taking_part, required_count, view)) is None:
            absent = _missing(workers, worker_count, view) if names is not None else None
            return replace(run_status, waits=cut or run_status.waits or absent or _not_reporting(workers, worker_count))
        return replace(run_status, state=State.RESTARTING, phase=None, seconds_left=None, waits=reason)
    lack = cut or (run_status.waits if running else None)
    reason = _missing(workers, worker_count, view) or _not_ready(workers, worker_count) or lack
    return _idle(run_status, reason or _launcher(alive, launchers, view, running))


def _missing(workers: Sequence[Object], worker_count: int, view: View) -> str | None:
    """Why workers are missing; None if the container of each one runs."""
    going = [pod for pod in workers if objects.deleted_at(pod) is not None]
    ended = [pod for pod in workers if objects.has_ended(pod) and pod not in going]
    out = sorted(avoidance.avoided(view.mpijob or {}))
    for pod in workers:
        if pod not in going and (reason := fault_of(pod, view.events, out)) is not None:
            return f"worker {_place(pod)} {reason}"
    if ended:
        return f"worker {_place(ended[0])} is dead ({end_reason(ended[0])}): `ortflow supervise` has it replaced"
    if going:
        return _leaving(going[0], view)
    if len(workers) >= worker_count:
        return None
    none = f"waiting for workers: the operator has made none of {worker_count} yet"
    return _nothing_made(view) or (_not_ready(workers, worker_count) if workers else none)


def _not_ready(workers: Sequence[Object], worker_count: int) -> str | None:
    """What a launcher pod without an attempt waits for; None if all workers are ready."""
    ready = sum(map(objects.is_ready, workers))
    return f"waiting for workers: {ready} of {worker_count} are ready" if ready < worker_count else None


def _not_reporting(workers: Sequence[Object], worker_count: int) -> str | None:
    """The note beside a running attempt while workers are not ready."""
    ready = sum(map(objects.is_ready, workers))
    if ready >= worker_count:
        return None
    # All pods of a node count as not ready while it does not report to the cluster, and after an outage of the API
    # server those of every node do. Ranks keep running; if they do not, the launcher pod detects it.
    return f"{ready} of {worker_count} workers are ready: the others do not report, or are slow to answer"


def _cut_off(pod: Object) -> str:
    """The message for a launcher pod whose node does not answer."""
    return (
        f"the node {objects.node(pod)} of the launcher pod does not answer: "
        "its later output is unknown, and the run may continue"
    )


def _leaving(pod: Object, view: View) -> str:
    late = view.now - (objects.deleted_at(pod) or view.now)
    if late > SILENCE:
        node = objects.node(pod)
        return (
            f"worker {_place(pod)} should have ended {late:.0f} s ago: its node {node} does not answer; "
            "`ortflow supervise` has it replaced"
        )
    reason = end_reason(pod)
    return f"worker {_place(pod)} is terminating" + (f" ({reason})" if reason != "deleted" else "")


def _launcher(alive: Sequence[Object], all_of_them: Sequence[Object], view: View, running: bool) -> str:
    """Why no attempt has begun although all workers are ready."""
    if running:
        return "starting: the launcher pod runs, its attempt has not begun"
    if alive:
        reason = fault_of(alive[-1], view.events)
        return f"the launcher pod {reason}" if reason else "the launcher pod is being prepared"
    if reason := _nothing_made(view):
        return reason
    if all_of_them and (names := objects.outlived_by(all_of_them[-1])):
        return (
            f"the launcher pod ended ({end_reason(all_of_them[-1])}), and its container {', '.join(names)} does not, "
            "so that no other can start: `ortflow supervise` ends it"
        )
    if all_of_them and objects.has_ended(all_of_them[-1]):
        limit = ((view.job or {}).get("spec") or {}).get("backoffLimit")
        return (
            f"the launcher pod ended ({end_reason(all_of_them[-1])}); the operator starts another, "
            f"{_retries(view) or 0} of {limit} retries are used"
        )
    return "the operator creates the launcher pod"


def _nothing_made(view: View) -> str | None:
    """Why a controller could not create a pod: a quota, a policy, a missing account.

    Events stay for an hour: one that is older than the newest pod is outdated.
    """
    messages = [
        *objects.events_of(view.events, view.name, warnings=True),
        *objects.events_of(view.events, f"{view.name}-launcher", warnings=True),
    ]
    newest = max(map(objects.created, view.pods), default=0.0)
    for event in reversed(messages):
        if objects.last_seen(event) < newest:
            continue
        if event.get("reason") in ("FailedCreate", "ErrResourceExists", "MPIJobFailed", "FailedCreatePod"):
            reason = " ".join(str(event.get("message") or "").split())
            return f"no pod can be made: {reason.removeprefix('worker pod created failed: ')}"
    return None


def _untouched(view: View) -> str:
    assert view.mpijob is not None
    age = view.now - objects.created(view.mpijob)
    if age < SILENCE:
        return "submitted; the operator has not processed it yet"
    managed = (((view.mpijob.get("spec") or {}).get("runPolicy")) or {}).get("managedBy")
    if managed and managed != "kubeflow.org/mpi-operator":
        return f"left to {managed}, which has not processed it for {age:.0f} s"
    return (
        f"no operator has processed it for {age:.0f} s: is the mpi-operator running? "
        "`kubectl get pods -A | grep mpi-operator`"
    )


def _retries(view: View) -> int | None:
    failed = ((view.job or {}).get("status") or {}).get("failed")
    return int(failed) if failed else None


def _place(pod: Object) -> str:
    return objects.label(pod, "training.kubeflow.org/replica-index") or objects.name(pod)
