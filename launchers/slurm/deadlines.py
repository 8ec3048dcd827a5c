"""When Slurm ends a job, for `seconds_left` of training programs: variables of the ranks.

Slurm 22.05 sets no SLURM_JOB_END_TIME, and no version tells a job how long it has after a preemption's SIGTERM.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress

from ortflow.launchers.slurm.commands import Slurm
from ortflow.launchers.slurm.site import Partition, read_config, read_partitions, seconds
from ortflow.workflow.errors import OrtflowError
from ortflow.workflow.program.deadline import KILL_SECONDS

KILL_WAIT = 30.0
"""Slurm's default, in seconds."""
END = "SLURM_JOB_END_TIME"


def deadlines(slurm: Slurm, environment: Mapping[str, str], now: float | None = None) -> dict[str, str]:
    """The variables, by two or three short commands; empty if Slurm does not answer. Raises nothing."""
    job, name = environment["SLURM_JOB_ID"], environment.get("SLURM_JOB_PARTITION", "")
    found: dict[str, str] = {}
    with suppress(OrtflowError):
        if END not in environment and (left := slurm.seconds_left(job)) is not None:
            found[END] = str(int((time.time() if now is None else now) + left))
        config = read_config(slurm.answer(["scontrol", "show", "config"]).out)
        shown = slurm.answer(["scontrol", "show", "partition", "--oneliner", name]).out
        found[KILL_SECONDS] = f"{kill_seconds(config, read_partitions(shown)):g}"
    return found


def kill_seconds(config: Mapping[str, str], places: list[Partition]) -> float:
    """Seconds between SIGTERM and SIGKILL of a preempted job: KillWait, and the grace of its partition. Pure.

    With preempt/qos the grace is the QOS's, which only the accounting knows: it is not counted. After scancel there is
    no grace.
    """
    known = seconds(config.get("KillWait", ""))
    kill = KILL_WAIT if known is None else known
    if config.get("PreemptType", "") != "preempt/partition_prio":
        return kill
    return kill + min((place.grace for place in places if place.preempt_mode != "OFF"), default=0)
