"""Repairs what the operator cannot: `python -m ortflow.launchers.kubernetes.supervise`, or `ortflow supervise`.

In the cluster it is a separate pod, with the run directory on the volume; in a terminal it uses the record directory,
updated from the logs before each snapshot. Both take a snapshot, decide (`reconciler`) and act until the run has ended.
It is stateless: its next snapshot shows what happened while it was down.
"""

from __future__ import annotations

import argparse
import copy
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import assert_never

from ortflow.launchers.attempts.exclusion import RETAIN
from ortflow.launchers.kubernetes import avoidance, objects
from ortflow.launchers.kubernetes.api import Cluster, Object, Refused, Unreachable
from ortflow.launchers.kubernetes.changes import CALM, wait
from ortflow.launchers.kubernetes.links import Links, adopt_job
from ortflow.launchers.kubernetes.log_replicator import LogReplicator
from ortflow.launchers.kubernetes.object_creation import new_suffix, owner
from ortflow.launchers.kubernetes.place import Place, read_place
from ortflow.launchers.kubernetes.reconciler import (
    Action,
    AvoidNodes,
    DeletePod,
    Done,
    EndPod,
    EndRetries,
    Resubmit,
    reconcile,
)
from ortflow.launchers.kubernetes.refusals import refusal
from ortflow.launchers.kubernetes.retries import Retries
from ortflow.launchers.kubernetes.snapshot import View, take_snapshot
from ortflow.launchers.records import Outcome, State, state
from ortflow.workflow.errors import EXIT_DONE, EXIT_FAILURE, EXIT_PREEMPTED, OrtflowError, UserError
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.spec.file.load import load_run_file
from ortflow.workflow.spec.file.paths import run_directory
from ortflow.workflow.spec.restart import Restart
from ortflow.workflow.system.clock import SYSTEM_CLOCK, Clock

PERIOD = 3.0
"""Seconds between two snapshots of a run in which something happens."""
TRIES = 5
"""Refusals in a row, of those that may pass, after which workers stay on the nodes that they were to leave."""
MAY_PASS = (401, 404, 409)
"""HTTP codes of refusals that say nothing of the change: of credentials, of a deleted and of a changed object."""
BIRTH = 60.0
"""Seconds for which the MPIJob may be missing: this pod is made before it."""
ONCE_ONLY = ("ORTFLOW_NEW_BUDGET", "ORTFLOW_FRESH")
"""Options of the first submission only."""


@dataclass(frozen=True)
class SupervisedRun:
    """The supervised run."""

    run: RunDir
    """The directory of its records."""
    place: Place
    """The first MPIJob that is supervised."""
    restart: Restart
    refresh: Callable[[View], None] = lambda view: None
    """Update the records."""


def supervise(
    charge: SupervisedRun, cluster: Cluster, report: Callable[[str], None], clock: Clock = SYSTEM_CLOCK
) -> int:
    """Supervise the run until it has ended; returns ortflow's exit code."""
    last, begun, retries = "", clock.monotonic(), Retries(PERIOD, clock)
    while True:
        try:
            view = take_snapshot(cluster, charge.place)
            if view.name != charge.place.job and clock.monotonic() < begun + BIRTH and not _was_there(charge):
                clock.sleep(PERIOD)
                continue
            charge.refresh(view)
            actions = reconcile(view, charge.run.read_attempts(), charge.restart)
            retries.forget_others(actions)
            due = [action for action in actions if retries.is_due(action)]
            for action in due:
                if not retries.count(action):
                    report(str(action))
                if isinstance(action, Done):
                    return _end(charge, action)
                _try(action, charge, cluster, view, report, retries, clock)
            last = ""
            if not due:
                wait(view, cluster, charge.place.namespace, PERIOD, clock, min(CALM, retries.seconds_left()))
                continue
        except (Unreachable, Refused) as error:
            message = str(refusal(error) if isinstance(error, Refused) else error)
            if message != last:
                report(f"{message}; trying again")
                last = message
        clock.sleep(PERIOD)


def _try(
    action: Action, charge: SupervisedRun, cluster: Cluster, view: View, report: Callable[[str], None],
    retries: Retries, clock: Clock,
) -> None:  # fmt: skip
    """Carry out an action; if the API server refuses it, the others go on without it until it is due again."""
    try:
        carry_out(action, charge, cluster, view, clock)
    except Refused as error:
        reason, count = refusal(error), retries.refused(action)
        lasts = isinstance(reason, UserError) and error.code not in MAY_PASS
        if isinstance(action, AvoidNodes) and (lasts or count >= TRIES):
            nodes = sorted(set(action.nodes) - avoidance.avoided(view.mpijob or {}))
            report(f"{reason}; workers stay on {', '.join(nodes)}")
            charge.run.record_attempt(event=RETAIN, nodes=nodes, why=str(reason))
        elif count == 1:
            report(f"{reason}; trying again, later each time")
    else:
        retries.succeeded(action)


def _was_there(charge: SupervisedRun) -> bool:
    """Whether the records have the submission: then a missing MPIJob was deleted."""
    records = charge.run.read_attempts()
    return any(record.get("event") == "submit" and record.get("job") == charge.place.job for record in records)


def carry_out(action: Action, charge: SupervisedRun, cluster: Cluster, view: View, clock: Clock = SYSTEM_CLOCK) -> None:
    """Carry out an action."""
    if isinstance(action, DeletePod):
        if action.held:
            failed = {"status": {"phase": "Failed", "reason": "NodeLost", "message": action.why}}
            cluster.patch("Pod", action.name, failed, charge.place.namespace, part="status")
        grace = 0 if action.force else None
        cluster.delete("Pod", action.name, charge.place.namespace, grace=grace, uid=action.uid)
    elif isinstance(action, EndPod):
        # The kubelet begins to tear down a pod whose phase says that it has ended.
        # The uid is a precondition: the API server refuses the change of another pod of this name.
        ended = {"metadata": {"uid": action.uid}, "status": {"phase": action.phase, "message": action.why}}
        cluster.patch("Pod", action.name, ended, charge.place.namespace, part="status")
    elif isinstance(action, AvoidNodes):
        assert view.mpijob is not None
        cluster.patch("MPIJob", view.name, avoidance.change(view.mpijob, action.nodes), charge.place.namespace)
    elif isinstance(action, EndRetries):
        cluster.patch("Job", action.job, {"spec": {"backoffLimit": 0}}, charge.place.namespace)
    elif isinstance(action, Resubmit):
        assert view.mpijob is not None
        clock.sleep(action.pause)
        new = cluster.create(successor(view.mpijob, new_suffix()))
        charge.run.record_attempt(
            event="submit", launcher="kubernetes", job=objects.name(new), follows=view.name, why=action.why
        )
    elif not isinstance(action, Done):
        assert_never(action)


def successor(mpijob: Object, suffix: str) -> Object:
    """The successor of an MPIJob that is over: the same under another name, with the first one's objects. Pure.

    The first one owns it, so that deleting the first one deletes it too.
    """
    old = objects.name(mpijob)
    new = f"{old.rpartition('-')[0]}-{suffix}"
    metadata, spec = mpijob["metadata"], copy.deepcopy(mpijob["spec"])
    for replica in (spec.get("mpiReplicaSpecs") or {}).values():
        template = replica.get("template") or {}
        _relabel(template.get("metadata") or {}, new)
        for container in template.get("spec", {}).get("containers") or []:
            variables = [variable for variable in container.get("env") or [] if variable.get("name") not in ONCE_ONLY]
            container["env"] = [
                {**variable, "value": new} if variable.get("name") == "ORTFLOW_JOB" else variable
                for variable in variables
            ]
        for spread in template.get("spec", {}).get("topologySpreadConstraints") or []:
            labels = (spread.get("labelSelector") or {}).get("matchLabels") or {}
            if labels.get(objects.JOB) == old:
                labels[objects.JOB] = new
    owners = [item for item in metadata.get("ownerReferences") or [] if item.get("kind") == "MPIJob"]
    notes = {
        key: value
        for key, value in (metadata.get("annotations") or {}).items()
        # `kubectl apply --prune` deletes an object with this annotation that is not among those applied.
        if key != "kubectl.kubernetes.io/last-applied-configuration"
    }
    new_metadata: Object = {
        "name": new, "labels": dict(metadata.get("labels") or {}), "annotations": notes,
        "ownerReferences": owners or [owner(mpijob)],
    }  # fmt: skip
    if "namespace" in metadata:
        new_metadata["namespace"] = metadata["namespace"]
    _relabel(new_metadata, new)
    return {"apiVersion": mpijob["apiVersion"], "kind": mpijob["kind"], "metadata": new_metadata, "spec": spec}


def _relabel(metadata: Object, job: str) -> None:
    if objects.JOB in (metadata.get("labels") or {}):
        metadata["labels"][objects.JOB] = job


def _end(charge: SupervisedRun, done: Done) -> int:
    records = charge.run.read_attempts()
    if done.outcome is not None:
        charge.run.record_attempt(event="stop", outcome=done.outcome.value, why=done.why, cause=done.why)
        return EXIT_PREEMPTED if done.outcome is Outcome.PREEMPTED else EXIT_FAILURE
    run_state = state(records, alive=False) if records else State.LOST
    if run_state is State.FINISHED:
        return EXIT_DONE
    return EXIT_PREEMPTED if run_state in (State.PREEMPTED, State.STOPPED, State.CANCELLED) else EXIT_FAILURE


def in_terminal(run: RunDir, links: Links, report: Callable[[str], None]) -> int:
    """Supervise a run from outside, with a copy of its records; returns ortflow's exit code."""
    cluster, place = links.of(run)
    spec = load_run_file(run.run_file)

    def refresh(view: View) -> None:
        adopt_job(run, view)
        if read_place(run) is not None:
            LogReplicator(run, cluster).sync(view.pods)

    return supervise(SupervisedRun(run, place, spec.restart, refresh), cluster, report)


def in_cluster(namespace: str, job: str) -> int:
    """Supervise the run to which this pod belongs."""
    from ortflow.launchers.kubernetes.contexts import connect

    spec = load_run_file(Path(os.environ["ORTFLOW_RUN_FILE"]))
    run = RunDir(run_directory(spec, Path(os.environ["ORTFLOW_MOUNT"])))

    def report(text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)

    cluster = connect(None, namespace)
    report(f"supervising {spec.name}, starting with MPIJob {job}")
    # This pod's own Job succeeds however the run has ended.
    supervise(SupervisedRun(run, Place(namespace, spec.name, job), spec.restart), cluster, report)
    return EXIT_DONE


def main(arguments: Sequence[str] | None = None) -> int:
    """The command of the supervisor's pod."""
    parser = argparse.ArgumentParser(prog="supervise")
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--job", required=True)
    options = parser.parse_args(arguments)
    # The first process of a container has no default handler, so the kubelet would wait out the grace period.
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(128 + number))
    try:
        return in_cluster(options.namespace, options.job)
    except OrtflowError as error:
        print(f"error: {error}", flush=True)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
