"""Actions for a run that the operator cannot recover. Pure: from one snapshot of its objects and its records.

The operator recreates a worker that is gone, but not one that is dead and still there; it waits forever for a pod on a
node that does not answer; it counts the launcher's pods and gives up. `supervise` carries out these actions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ortflow.launchers.attempts.exclusion import excluded, retained
from ortflow.launchers.budget import decide
from ortflow.launchers.kubernetes import objects
from ortflow.launchers.kubernetes.api import Object
from ortflow.launchers.kubernetes.avoidance import avoided
from ortflow.launchers.kubernetes.reasons import end_reason
from ortflow.launchers.kubernetes.snapshot import View
from ortflow.launchers.kubernetes.status import given_up, is_settled, refused
from ortflow.launchers.records import Outcome, State, Used, attempts_without_step, state, used
from ortflow.workflow.spec.restart import Restart

LATE = 15.0
"""Seconds beyond its grace period after which a terminating pod counts as lost: its node does not answer."""


@dataclass(frozen=True)
class DeletePod:
    """Delete a pod, so that the operator creates another."""

    name: str
    uid: str
    why: str
    force: bool = False
    """Without waiting for its node."""
    held: bool = False
    """Its batch Job's finalizer holds it until it has failed, which its node will never report."""
    alive: bool = False
    """It could go on, but is to be elsewhere."""

    def __str__(self) -> str:
        what = "removing lost" if self.force else "deleting" if self.alive else "deleting dead"
        return f"{what} pod {self.name}: {self.why}"


@dataclass(frozen=True)
class EndPod:
    """Report a pod's end: its container has ended, and others in it do not. The kubelet then stops these."""

    name: str
    uid: str
    why: str
    phase: str
    """Succeeded or Failed."""

    def __str__(self) -> str:
        return f"ending pod {self.name}: {self.why}"


@dataclass(frozen=True)
class AvoidNodes:
    """Have the operator create workers on other nodes from now on."""

    nodes: tuple[str, ...]

    def __str__(self) -> str:
        return f"new workers are on other nodes than {', '.join(self.nodes)}"


@dataclass(frozen=True)
class EndRetries:
    """Stop the batch Job from starting launcher pods."""

    job: str
    why: str

    def __str__(self) -> str:
        return f"ending the retries of {self.job}: {self.why}"


@dataclass(frozen=True)
class Resubmit:
    """Submit the run again under a new name: the operator gave up."""

    why: str
    pause: float = 0.0
    """Seconds to wait before."""

    def __str__(self) -> str:
        return f"submitting again: {self.why}"


@dataclass(frozen=True)
class Done:
    """Nothing is left to do."""

    why: str
    outcome: Outcome | None = None
    """The outcome to record, if the records do not have one."""

    def __str__(self) -> str:
        return self.why


Action = DeletePod | EndPod | AvoidNodes | EndRetries | Resubmit | Done


def reconcile(view: View, records: Sequence[dict[str, Any]], restart: Restart) -> list[Action]:
    """The actions to take now, in their order; none if the operator is working on it."""
    if view.mpijob is None:
        return [Done(view.gone or "the MPIJob was deleted")]
    lost: list[Action] = [_lost(pod) for pod in view.pods if _is_lost(pod, view.now)]
    lost += [_outlived(pod) for pod in view.pods if _is_outlived(pod, view.now)]
    if is_settled(records):
        return [*lost, *_settled(view, records)]
    if objects.deleted_at(view.mpijob) is not None:
        return [*lost]
    if objects.over(view.mpijob):
        return [*lost, _over(view, records, restart)]
    if (reason := refused(view)) is not None:
        return [Done(f"the operator rejects the MPIJob: {reason}")]
    if (reason := given_up(view, records)) is not None:
        return [*lost, *_end_retries(view, reason)]
    return [*lost, *_avoid_nodes(view.mpijob, records), *_replace_workers(view, records)]


def _avoid_nodes(mpijob: Object, records: Sequence[dict[str, Any]]) -> list[AvoidNodes]:
    out, before = set(excluded(records)) - set(retained(records)), avoided(mpijob)
    return [] if out <= before else [AvoidNodes(tuple(sorted(out | before)))]


def _replace_workers(view: View, records: Sequence[dict[str, Any]]) -> list[DeletePod]:
    """Dead workers, and those on nodes that the template excludes already: the operator creates others elsewhere."""
    assert view.mpijob is not None
    workers = objects.of_role(view.pods, "worker")
    out = set(excluded(records)) & avoided(view.mpijob)
    dead = [_dead(pod) for pod in workers if _is_dead(pod)]
    return [*dead, *(_on_excluded(pod) for pod in workers if objects.node(pod) in out and _stays(pod))]


def _is_lost(pod: Object, now: float) -> bool:
    due = objects.deleted_at(pod)
    return due is not None and now > due + LATE


def _lost(pod: Object) -> DeletePod:
    node = objects.node(pod) or "nowhere"
    has_finalizers = bool(pod["metadata"].get("finalizers"))
    return DeletePod(
        objects.name(pod), objects.uid(pod), f"its node {node} does not answer", force=True, held=has_finalizers
    )


def _is_outlived(pod: Object, now: float) -> bool:
    return bool(objects.outlived_by(pod)) and objects.deleted_at(pod) is None and now > objects.ended_at(pod) + LATE


def _outlived(pod: Object) -> EndPod:
    names = ", ".join(objects.outlived_by(pod))
    phase = "Failed" if objects.exit_code(pod) else "Succeeded"
    return EndPod(objects.name(pod), objects.uid(pod), f"its launcher has ended, and {names} does not", phase)


def _is_dead(pod: Object) -> bool:
    return objects.has_ended(pod) and objects.deleted_at(pod) is None


def _stays(pod: Object) -> bool:
    return objects.deleted_at(pod) is None and not objects.has_ended(pod)


def _on_excluded(pod: Object) -> DeletePod:
    """No attempt uses it: they exclude the node, too."""
    why = f"its node {objects.node(pod)} takes part in no attempt"
    return DeletePod(objects.name(pod), objects.uid(pod), why, alive=True)


def _dead(pod: Object) -> DeletePod:
    return DeletePod(objects.name(pod), objects.uid(pod), end_reason(pod))


def _settled(view: View, records: Sequence[dict[str, Any]]) -> list[Action]:
    assert view.mpijob is not None
    run_state = state(records, alive=True)
    if objects.over(view.mpijob):
        return [Done(f"the run has ended: {run_state.value}")]
    if run_state in (State.FAILED, State.PREEMPTED, State.STOPPED, State.CANCELLED, State.LOST):
        return _end_retries(view, f"the run has ended: {run_state.value}")
    return []


def _end_retries(view: View, reason: str) -> list[Action]:
    """The operator then sees the Job fail, and releases the workers."""
    limit = ((view.job or {}).get("spec") or {}).get("backoffLimit")
    return [EndRetries(objects.name(view.job), reason)] if view.job is not None and limit != 0 else []


def _over(view: View, records: Sequence[dict[str, Any]], restart: Restart) -> Action:
    """The operator has finished a run that has not ended."""
    failed = objects.condition(view.mpijob, "Failed") or {}
    reasons = (str(failed.get("reason")), str((objects.condition(view.job, "Failed") or {}).get("reason")))
    if objects.holds(view.mpijob, "Succeeded"):
        return Done("the MPIJob has succeeded, and the end of its log was not seen")
    if any("DeadlineExceeded" in reason for reason in reasons):
        return Done("its deadline has passed; `ortflow resume` continues the run", Outcome.PREEMPTED)
    launchers = objects.of_role(view.pods, "launcher")
    if launchers and objects.exit_code(launchers[-1]) == 2:
        return Done(end_reason(launchers[-1]), Outcome.USER_ERROR)
    is_disrupted = bool(launchers) and objects.disrupted(launchers[-1]) is not None
    before, vain = used(records), submissions_without_attempt(records)
    if is_disrupted:
        outcome, spent = Outcome.PREEMPTED, Used(before.failures, before.preemptions + 1)
    elif vain:
        # The last submission started no attempt: it would fail again, so this must not repeat forever.
        outcome, spent = Outcome.FAILURE, Used(before.failures + vain, before.preemptions)
    else:
        outcome, spent = Outcome.LOST, before
    decision = decide(outcome, spent, restart, attempts_without_step(records))
    end_text = f"the operator gave up ({end_reason(launchers[-1]) if launchers else reasons[0]})"
    if decision.again:
        return Resubmit(f"{end_text}; {decision.reason}", decision.pause)
    return Done(f"{end_text}, and {decision.reason}", Outcome.FAILURE)


def submissions_without_attempt(records: Sequence[dict[str, Any]]) -> int:
    """How many of the newest submissions in a row started no attempt."""
    jobs: list[str] = []
    for record in reversed(records):
        if record.get("event") == "start":
            break
        if record.get("event") == "submit" and record.get("job") not in jobs:
            jobs.append(str(record.get("job")))
    return len(jobs)
