"""Why a job is pending, as a message, and whether waiting helps. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ortflow.launchers.slurm.jobs import Job


@dataclass(frozen=True)
class Reason:
    """One of Slurm's reasons as a message."""

    message: str
    never: bool = False
    """Whether the job never starts by waiting alone."""
    fix: str = ""
    """The fix; JOB stands for the job's id."""


_RESUBMIT = "cancel the run, correct the run file and submit it again"
_EXACT: dict[str, Reason] = {
    "": Reason("Slurm has not considered it yet"),
    "Resources": Reason("waits for free nodes, cores, memory or GPUs"),
    "Priority": Reason("jobs of a higher priority come first"),
    "Dependency": Reason("waits for another job to end"),
    "DependencyNeverSatisfied": Reason(
        "the job that it depends on did not end as required", True, "cancel the run and submit it again"
    ),
    "BeginTime": Reason("its begin time is in the future"),
    "JobHeldUser": Reason("it is held by its user", True, "`scontrol release JOB`"),
    "JobHeldAdmin": Reason("it is held by an administrator", True, "ask the administrators of the cluster"),
    "JobHoldMaxRequeue": Reason(
        "Slurm has requeued it too often and holds it", True, "see why it ends, then `scontrol release JOB`"
    ),
    "PartitionNodeLimit": Reason(
        "it asks for more nodes than the partition has or allows, or those it names are down",
        True,
        f"lower resources.nodes or choose another backends.slurm.partition: {_RESUBMIT}",
    ),
    "PartitionTimeLimit": Reason(
        "its time limit is longer than the partition allows",
        True,
        f"shorten resources.time_limit or choose another backends.slurm.partition: {_RESUBMIT}",
    ),
    "PartitionConfig": Reason(
        "the partition has fewer nodes than it asks for, or none with as many cores, as much memory or as many GPUs",
        True,
        f"lower resources.nodes, ranks_per_node, cpus_per_rank, gpus_per_rank or memory: {_RESUBMIT}",
    ),
    "PartitionDown": Reason("the partition is down"),
    "PartitionInactive": Reason("the partition accepts jobs and starts none"),
    "BadConstraints": Reason(
        "no node has what it asks for",
        True,
        f"correct backends.slurm.constraint, or what resources asks for: {_RESUBMIT}",
    ),
    "InvalidQOS": Reason("there is no such QOS, or not for this account", True, f"backends.slurm.qos: {_RESUBMIT}"),
    "InvalidAccount": Reason(
        "there is no such account, or not for this user", True, f"backends.slurm.account: {_RESUBMIT}"
    ),
    "AccountNotAllowed": Reason(
        "the partition does not accept this account", True, f"backends.slurm.account or partition: {_RESUBMIT}"
    ),
    "QOSNotAllowed": Reason(
        "the partition does not accept this QOS", True, f"backends.slurm.qos or partition: {_RESUBMIT}"
    ),
    "AccountingPolicy": Reason("a limit of the account or the QOS is reached"),
    "QOSUsageThreshold": Reason("the account's usage exceeds what the QOS allows"),
    "ReqNodeNotAvail": Reason("a node that it needs is down, drained or reserved"),
    "NodeDown": Reason("a node that it needs is down"),
    "Reservation": Reason("its reservation has not begun, or has no free nodes"),
    "ReservationDeleted": Reason(
        "its reservation was deleted", True, f"remove backends.slurm.reservation: {_RESUBMIT}"
    ),
    "Licenses": Reason("waits for a licence"),
    "Cleaning": Reason("Slurm still cleans up after its last start"),
    "Prolog": Reason("the site's prolog runs on its nodes"),
    "DeadLine": Reason("it can no longer end before its deadline", True, _RESUBMIT),
    "JobArrayTaskLimit": Reason("the limit of running tasks of the array is reached"),
    "NodeReboot": Reason("its nodes are restarted first"),
    "BurstBufferResources": Reason("waits for burst buffer space"),
    "BurstBufferStageIn": Reason("files are copied to the burst buffer"),
    "BurstBufferOperation": Reason(
        "the burst buffer could not be set up", True, "ask the administrators of the cluster"
    ),
    "SchedDefer": Reason("Slurm considers it in its next scheduling cycle"),
    "OutOfMemory": Reason("it has used more memory than it asked for"),
    "JobLaunchFailure": Reason("Slurm could not start it", True, "see why, then `scontrol release JOB`"),
    "SystemFailure": Reason("Slurm itself has failed", True, "ask the administrators of the cluster"),
}
_PATTERNS: tuple[tuple[str, Reason], ...] = (
    (
        r"launch failed requeued held",
        Reason(
            "Slurm could not start it on its nodes and holds it: the run directory may be missing there",
            True,
            "`scontrol release JOB` tries again; or cancel the run, and submit it with the bad node in "
            "backends.slurm.exclude",
        ),
    ),
    (
        r"(?:job )?requeued (?:in )?(?:held|special)",
        Reason("it has been held since it was requeued", True, "`scontrol release JOB`"),
    ),
    (r"ReqNodeNotAvail.*reserved", Reason("a node that it needs is reserved, as for maintenance")),
    (r"ReqNodeNotAvail.*UnavailableNodes:(?P<nodes>\S*)", Reason("nodes that it needs are down or drained")),
    (r"(?:ReqNodeNotAvail|Nodes required for job are)", Reason("a node that it needs is down, drained or reserved")),
    (
        r"(?:AssocMax|QOSMax)\w*(?:PerJob|PerNode|MinutesPerJob|WallDurationPerJob)\w*|QOSMin\w+|MaxMemPerLimit|"
        r"QOS(?:TimeLimit|MaxWall\w*)|Association(?:Time)Limit",
        Reason(
            "it alone asks for more than a limit of its {whose} allows",
            True,
            f"ask for less of the machines or less time, or use another {{whose}}: {_RESUBMIT}",
        ),
    ),
    (
        r"(?:AssocGrp|QOSGrp)\w*Minutes\w*",
        Reason(
            "the {whose} has used up its time budget",
            True,
            "wait until it is renewed, or submit it under another {whose}",
        ),
    ),
    (r"(?:AssocGrp|QOSGrp)\w*", Reason("all jobs of the {whose} together are at their limit")),
    (r"(?:Assoc|QOS)\w*(?:PerUser|JobsLimit|JobLimit)\w*", Reason("this user's jobs are at the limit of the {whose}")),
    (r"(?:Max\w+PerAccount|QOSMax\w*PerAccount\w*)", Reason("the account's jobs are at their limit")),
    (r"(?:QOS|Assoc)\w*", Reason("a limit of the {whose} is reached")),
)  # fmt: skip


def explain(reason: str) -> Reason:
    """The message for a reason of squeue; an unknown reason is shown unchanged."""
    reason = reason.strip("() ")
    if reason in _EXACT:
        return _EXACT[reason]
    for pattern, explanation in _PATTERNS:
        if match := re.match(pattern, reason):
            whose = "QOS" if reason.startswith("QOS") else "account"
            nodes = match.groupdict().get("nodes")
            message = explanation.message.format(whose=whose) + (f": {nodes}" if nodes else "")
            return Reason(f"{message} ({reason})", explanation.never, explanation.fix.format(whose=whose))
    return Reason(f"Slurm reports: {reason}")


def waits(job: Job) -> str:
    """Why a job is pending, in one sentence; also if it will never start by itself."""
    explanation = _explained(job)
    if job.reason == "Dependency" and job.dependency:
        explanation = Reason(f"{explanation.message}: {job.dependency.replace('(unfulfilled)', '')}")
    # 120 s by default, and what the site sets for it is read by the doctor only (`site.restart_delay`).
    if job.reason == "BeginTime" and job.restarts:
        explanation = Reason("Slurm delays its next start, by two minutes unless the site has set another time")
    fix = explanation.fix.replace("JOB", job.id)
    text = f"will never start by itself: {explanation.message}" if explanation.never else explanation.message
    return f"{text}; {fix}" if fix else text


def left_in_queue(job: Job) -> str:
    """Why a run that has ended still has a job in the queue, and how that job ends, in one sentence."""
    explanation = _explained(job)
    if not explanation.never:
        return (
            f"the run has ended, and job {job.id} is still in the queue: {explanation.message}; it ends when it starts"
        )
    return (
        f"the run has ended, and job {job.id} is still in the queue: {explanation.message}; "
        f"`scontrol release {job.id}` lets it end, `scancel {job.id}` removes it"
    )


def never_starts(job: Job) -> bool:
    """Whether it never starts by waiting alone. Pure."""
    return _explained(job).never


def _explained(job: Job) -> Reason:
    explanation = explain(job.reason)
    return _EXACT["JobHeldUser"] if job.state == "REQUEUE_HOLD" and not explanation.never else explanation
