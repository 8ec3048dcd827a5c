"""When Slurm ends a job, for `seconds_left` of training programs: variables of the ranks.

Slurm 22.05 sets no SLURM_JOB_END_TIME, and no version tells a job how long it has after SIGTERM.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress

from ortflow.launchers.slurm.commands import Slurm
from ortflow.launchers.slurm.site import read_config, seconds
from ortflow.workflow.errors import OrtflowError
from ortflow.workflow.program.deadline import END, KILL_WAIT

USUAL_KILL_WAIT = 30.0
"""Slurm's default, in seconds."""


def deadlines(slurm: Slurm, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables, by one or two short commands; those that Slurm does not answer are missing. Never raises."""
    variables: dict[str, str] = {}
    with suppress(OrtflowError):
        if END not in environment and (seconds_left := slurm.seconds_left(environment["SLURM_JOB_ID"])) is not None:
            variables[END] = str(int(time.time() + seconds_left))
        kill_wait = seconds(read_config(slurm.answer(["scontrol", "show", "config"]).out).get("KillWait", ""))
        variables[KILL_WAIT] = f"{USUAL_KILL_WAIT if kill_wait is None else kill_wait:g}"
    return variables
