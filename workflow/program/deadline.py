"""How long a program has to stop: until ortflow, the scheduler or the kubelet kills it. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from ortflow.workflow.spec.run import ProgramRunSpec

KILL_SECONDS = "ORTFLOW_KILL_SECONDS"
"""Seconds between Slurm's SIGTERM and its SIGKILL: GraceTime of the partition and KillWait; the launcher sets it."""
EARLY = 60.0
"""Slurm checks time limits once a minute: the signal ahead of the limit comes up to this many seconds earlier."""
PODS_SHARE = 0.75
"""Share of the pods' grace that a program has to stop."""


def stop_limit(spec: ProgramRunSpec, launcher: str) -> float:
    """Seconds that a program has to stop; in pods less than their grace, in which the ranks must end too."""
    if launcher != "kubernetes":
        return spec.program.stop_seconds
    return min(spec.program.stop_seconds, PODS_SHARE * spec.backends.kubernetes.grace_seconds)


def slurm_seconds(
    environment: Mapping[str, str], lead: float, reason: str | None, now: float, asked_at: float
) -> float | None:
    """Seconds until Slurm kills the job, as far as it is known.

    Parameters
    ----------
    environment
        Slurm's variables of the rank, and `KILL_SECONDS`.
    lead
        Seconds ahead of the time limit at which Slurm was asked to send a signal.
    reason
        Why the run stops: the name of a signal, or a text; None before it was asked to.
    now, asked_at
        By the clock of the machine, in seconds since the epoch.
    """
    end = environment.get("SLURM_JOB_END_TIME", "")
    left = int(end) - now if end.isdigit() else None
    if reason is None or not reason.startswith("SIG") or not environment.get("SLURM_JOB_ID"):
        return left
    ahead_of_limit = left is not None and left + (now - asked_at) <= lead + EARLY
    kill = environment.get(KILL_SECONDS, "")
    if ahead_of_limit or not kill:
        return left
    # A preemption or scancel: the time limit does not matter any more.
    return float(kill) - (now - asked_at)
