"""How long a program has to stop: until ortflow, the scheduler or the kubelet kills it. Pure, except `ask_slurm`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress

from ortflow.workflow.spec.run import ProgramRunSpec

# Slurm 22.05 does not set the first: the launcher does.
END, KILL_WAIT = "SLURM_JOB_END_TIME", "ORTFLOW_KILL_WAIT"
"""Variables of a rank under Slurm: the end of the job, in seconds since the epoch; seconds from SIGTERM to SIGKILL."""
PODS_SHARE = 0.75
"""Share of the pods' grace that a program has to stop."""
PATIENCE = 2.5
"""Seconds that the answer about the job may take: the ranks wait for it."""


def stop_limit(spec: ProgramRunSpec, launcher: str) -> float:
    """Seconds that a program has to stop; in pods less than their grace, in which the ranks must end too."""
    if launcher != "kubernetes":
        return spec.program.stop_seconds
    return min(spec.program.stop_seconds, PODS_SHARE * spec.backends.kubernetes.grace_seconds)


def job_end(environment: Mapping[str, str], now: float) -> float | None:
    """Seconds to the job's end, as it was when the attempt began; None if it is unknown."""
    end = environment.get(END, "")
    return int(end) - now if end.isdigit() else None


def after_signal(reason: str, shown: str, environment: Mapping[str, str], now: float) -> float | None:
    """Seconds until Slurm kills a job that has just got a signal; None if that is unknown.

    Parameters
    ----------
    reason
        The signal's name.
    shown
        `scontrol show job --oneliner`, with times in seconds since the epoch; empty if there was no answer.
    """
    fields = dict(re.findall(r"(?:^|\s)(\w+)=(\S*)", shown))
    kill_wait = environment.get(KILL_WAIT, "")
    kill = float(kill_wait) if kill_wait else None
    running, end = fields.get("JobState") == "RUNNING", fields.get("EndTime", "")
    if running and end.isdigit():
        # EndTime is moved to the end of a preemption's grace, after which the job has KillWait.
        preempted = fields.get("PreemptTime", "None").isdigit()
        return int(end) - now + ((kill or 0.0) if preempted else 0.0)
    # Cancelled, or queued again: no grace. Without an answer, the signal ahead of the limit is the user's.
    return kill if reason == "SIGTERM" or shown else job_end(environment, now)


def ask_slurm(reason: str, environment: Mapping[str, str] = os.environ) -> float | None:
    """Seconds until Slurm kills this rank's job after a signal; None where it is unknown. Waits at most PATIENCE."""
    job = environment.get("SLURM_JOB_ID", "")
    if not job or not reason.startswith("SIG"):
        return None
    shown = ""
    with suppress(OSError, subprocess.SubprocessError):
        shown = subprocess.run(
            ["scontrol", "show", "job", "--oneliner", job], env={**environment, "SLURM_TIME_FORMAT": "%s"},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE, check=True,
            # Slurm sends SIGTERM twice, to every process of the step.
            preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
        ).stdout  # fmt: skip
    return after_signal(reason, shown, environment, time.time())
