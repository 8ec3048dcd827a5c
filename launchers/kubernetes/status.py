"""How a run on Kubernetes is: what its record directory tells, and what the cluster adds. Pure.

The run's own records are the truth about it; the cluster alone knows why it waits, where it runs, and what became of
pods that ended without a word. A Failed condition is no end: only `status.completionTime` is.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from ortflow.launchers.kubernetes import objects
from ortflow.launchers.kubernetes.api import Object
from ortflow.launchers.kubernetes.look import View
from ortflow.launchers.kubernetes.reasons import end_words, told_end, trouble
from ortflow.launchers.records import State, open_attempt, state
from ortflow.launchers.status import RunStatus
from ortflow.workflow.errors import EXIT_USER

SILENCE = 15.0
"""Seconds in which an operator has looked at a new MPIJob, if there is one."""
VALIDATION = "ValidationError"
"""Reason of the event by which the operator refuses an MPIJob."""


def is_settled(records: Sequence[dict[str, Any]]) -> bool:
    """Whether the records alone say how the run ended."""
    return bool(records) and not state(records, alive=True).active


def status(
    told: RunStatus, records: Sequence[dict[str, Any]], view: View, *, silent: Collection[str] = (),
    unread: Collection[str] = (),
) -> RunStatus:  # fmt: skip
    """The run's status; `told` is what its records tell of a run that somebody is at work on.

    `silent`: uids of launcher pods that have said nothing of the run's attempts: one that the records call running is
    that of a pod before them. `unread`: of those whose log does not come.
    """
    told = replace(told, launcher="kubernetes")
    if is_settled(records):
        return told
    if view.mpijob is None:
        return replace(told, state=State.LOST, phase=None, cause=view.gone) if view.gone else _gone(told)
    told = replace(told, job=view.name, job_restarts=_retries(view))
    if objects.deleted_at(view.mpijob) is not None:
        return replace(told, waits="it is being deleted: ranks save and leave")
    if objects.over(view.mpijob):
        return _over(told, view)
    if (error := refused(view)) is not None:
        return replace(told, state=State.FAILED, cause=f"the operator does not take the MPIJob: {error}", phase=None)
    if (words := given_up(view, records)) is not None:
        return replace(told, state=State.FAILED, cause=words, phase=None)
    if (words := held(view)) is not None:
        return _idle(told, words)
    return _at_work(told, records, view, silent, unread)


def refused(view: View) -> str | None:
    """What the operator has against the MPIJob: it will never touch it."""
    for event in reversed(objects.events_of(view.events, view.name, warnings=True)):
        if event.get("reason") == VALIDATION:
            return " ".join(str(event.get("message") or "").split()).removeprefix("Found validation errors: ")
    return None


def given_up(view: View, records: Sequence[dict[str, Any]]) -> str | None:
    """What the newest launcher pod that has ended said when it left because the input is wrong.

    The operator starts others, which will say the same, until one begins an attempt.
    """
    ended = [pod for pod in objects.of_role(view.pods, "launcher") if objects.has_ended(pod)]
    if not ended or _has_started(records):
        return None
    code, words = told_end(ended[-1])
    return (words or "the launcher pod ended with exit code 2") if code == EXIT_USER else None


def _has_started(records: Sequence[dict[str, Any]]) -> bool:
    """Whether an attempt came of the newest submission."""
    for record in reversed(records):
        if record.get("event") in ("start", "submit"):
            return bool(record["event"] == "start")
    return False


def held(view: View) -> str | None:
    """Why nobody may start it: suspended, by a person or by a queue that has no quota for it."""
    assert view.mpijob is not None
    if suspended(view):
        namespace = view.mpijob["metadata"].get("namespace")
        return f"it is suspended; `ortflow resume kubernetes://{namespace}/{view.name}` starts it"
    queue = objects.label(view.mpijob, objects.QUEUE)
    if not queue or not _policy(view.mpijob).get("suspend"):
        return None
    for kind in ("Evicted", "QuotaReserved", "Admitted"):
        found = objects.condition(view.workload, kind)
        wrong = "True" if kind == "Evicted" else "False"
        if found is not None and found.get("status") == wrong and found.get("message"):
            return f"waits for quota in queue {queue}: {found['message']}"
    return f"waits for quota in queue {queue}"


def suspended(view: View) -> bool:
    """Whether nothing starts until a person says so."""
    if view.mpijob is None or objects.over(view.mpijob) or objects.label(view.mpijob, objects.QUEUE):
        return False
    return bool(_policy(view.mpijob).get("suspend"))


def _policy(mpijob: Object) -> Object:
    return (mpijob.get("spec") or {}).get("runPolicy") or {}


def _gone(told: RunStatus) -> RunStatus:
    if told.job is None and told.attempts == 0 and told.state is not State.PENDING:
        return replace(told, state=State.LOST, cause=told.cause or "it was never submitted")
    named = f"MPIJob {told.job}" if told.job else "its MPIJob"
    return replace(told, state=State.CANCELLED, phase=None, cause=f"{named} no longer exists: it was deleted")


def _over(told: RunStatus, view: View) -> RunStatus:
    """The operator is done with it, and the records do not say how it ended."""
    if objects.holds(view.mpijob, "Succeeded"):
        # The launcher pod ends with 0 only where the run directory says so.
        return replace(told, state=State.FINISHED, phase=None, cause=told.cause or "finished")
    failed = objects.condition(view.mpijob, "Failed") or {}
    return replace(told, state=State.LOST, phase=None, cause=_end_of(view, failed))


def _end_of(view: View, failed: Object) -> str:
    reason = str(failed.get("reason") or "")
    if "DeadlineExceeded" in reason or "DeadlineExceeded" in str(_job_failure(view).get("reason")):
        return "its deadline has passed; `ortflow resume` goes on; raise backends.kubernetes.deadline"
    pods = objects.of_role(view.pods, "launcher")
    last = f"; its last launcher pod: {end_words(pods[-1])}" if pods else ""
    message = " ".join(str(failed.get("message") or "").split())
    return f"the operator gave up ({message or reason or 'no reason given'}){last}"


def _job_failure(view: View) -> Object:
    return objects.condition(view.job, "Failed") or {}


def _idle(told: RunStatus, words: str) -> RunStatus:
    """Nothing of it runs now."""
    now = State.PENDING if told.state is State.PENDING else State.RESTARTING
    return replace(told, state=now, phase=None, seconds_left=None, waits=words)


def _at_work(
    told: RunStatus, records: Sequence[dict[str, Any]], view: View, silent: Collection[str], unread: Collection[str]
) -> RunStatus:
    assert view.mpijob is not None
    workers = objects.of_role(view.pods, "worker")
    launchers = objects.of_role(view.pods, "launcher")
    alive = [pod for pod in launchers if not objects.has_ended(pod) and objects.deleted_at(pod) is None]
    nodes = sorted(
        {str(pod["spec"]["nodeName"]) for pod in workers or alive if (pod.get("spec") or {}).get("nodeName")}
    )
    told = replace(told, nodes=", ".join(nodes) or None)
    if not (view.mpijob.get("status") or {}).get("conditions"):
        # It has none either where the operator could not make the first pod.
        return _idle(told, _nothing_made(view) or _untouched(view))
    wanted = _wanted(view.mpijob)
    running = bool(alive) and objects.has_begun(alive[-1])
    cut = _cut_off(alive[-1]) if running and objects.uid(alive[-1]) in unread else None
    if open_attempt(records) is not None and running and objects.uid(alive[-1]) not in silent:
        if (words := _missing(workers, wanted, view)) is None:
            return replace(told, waits=cut or told.waits or _unheard(workers, wanted))
        return replace(told, state=State.RESTARTING, phase=None, seconds_left=None, waits=words)
    lack = cut or (told.waits if running else None)
    words = _missing(workers, wanted, view) or _not_ready(workers, wanted) or lack
    return _idle(told, words or _launcher(alive, launchers, view, running))


def _wanted(mpijob: Object) -> int:
    workers = ((mpijob.get("spec") or {}).get("mpiReplicaSpecs") or {}).get("Worker") or {}
    return int(workers.get("replicas", 1)) if workers else 0


def _missing(workers: Sequence[Object], wanted: int, view: View) -> str | None:
    """What keeps workers from being there; None if the container of each one runs."""
    going = [pod for pod in workers if objects.deleted_at(pod) is not None]
    ended = [pod for pod in workers if objects.has_ended(pod) and pod not in going]
    for pod in workers:
        if pod not in going and (words := trouble(pod, view.events)) is not None:
            return f"worker {_place(pod)} {words}"
    if ended:
        return f"worker {_place(ended[0])} is dead ({end_words(ended[0])}): `ortflow supervise` has it replaced"
    if going:
        return _leaving(going[0], view)
    if not workers and wanted:
        return _nothing_made(view) or f"waiting for workers: the operator has made none of {wanted} yet"
    return _not_ready(workers, wanted) if len(workers) < wanted else None


def _not_ready(workers: Sequence[Object], wanted: int) -> str | None:
    """What a launcher pod that has begun no attempt waits for; None if all workers are ready."""
    ready = sum(map(objects.is_ready, workers))
    return f"waiting for workers: {ready} of {wanted} are ready" if ready < wanted else None


def _unheard(workers: Sequence[Object], wanted: int) -> str | None:
    """What stands beside an attempt that runs while workers are not ready.

    All pods of a node count as not ready while the cluster hears nothing of it, and after an outage of the API server
    those of every node do. Ranks go on; where they do not, the launcher pod finds out.
    """
    ready = sum(map(objects.is_ready, workers))
    if ready >= wanted:
        return None
    return f"{ready} of {wanted} workers are ready: the cluster does not hear of the others, or they are slow to answer"


def _cut_off(pod: Object) -> str:
    """The message for a launcher pod whose node does not answer."""
    return (
        f"the node {objects.node(pod)} of the launcher pod does not answer: "
        "what it has said since is not known, and the run may go on"
    )


def _leaving(pod: Object, view: View) -> str:
    late = view.now - (objects.deleted_at(pod) or view.now)
    if late > SILENCE:
        node = objects.node(pod)
        return (
            f"worker {_place(pod)} should have ended {late:.0f} s ago: its node {node} does not answer; "
            "`ortflow supervise` has it replaced"
        )
    why = end_words(pod)
    return f"worker {_place(pod)} is terminating" + (f" ({why})" if why != "deleted" else "")


def _launcher(alive: Sequence[Object], all_of_them: Sequence[Object], view: View, running: bool) -> str:
    """Why no attempt has begun, all workers being there."""
    if running:
        return "starting: the launcher pod runs, its attempt has not begun"
    if alive:
        words = trouble(alive[-1], view.events)
        return f"the launcher pod {words}" if words else "the launcher pod is being prepared"
    if words := _nothing_made(view):
        return words
    if all_of_them and objects.has_ended(all_of_them[-1]):
        limit = ((view.job or {}).get("spec") or {}).get("backoffLimit")
        return (
            f"the launcher pod ended ({end_words(all_of_them[-1])}); the operator starts another, "
            f"{_retries(view) or 0} of {limit} retries are used"
        )
    return "the operator creates the launcher pod"


def _nothing_made(view: View) -> str | None:
    """What a controller said where it could make no pod: a quota, a policy, a missing account."""
    told = [
        *objects.events_of(view.events, view.name, warnings=True),
        *objects.events_of(view.events, f"{view.name}-launcher", warnings=True),
    ]
    for event in reversed(told):
        if event.get("reason") in ("FailedCreate", "ErrResourceExists", "MPIJobFailed", "FailedCreatePod"):
            words = " ".join(str(event.get("message") or "").split())
            return f"no pod can be made: {words.removeprefix('worker pod created failed: ')}"
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
