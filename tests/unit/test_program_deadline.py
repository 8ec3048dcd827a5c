"""How long a program has to stop, from what Slurm 22.05 reports of a job that got a signal."""

from __future__ import annotations

import pytest
from fake_slurm import DEAD, Fake

from ortflow.launchers.slurm.deadlines import deadlines
from ortflow.workflow.program.deadline import after_signal, ask_slurm, job_end

JOB = (
    "JobId=7 JobName=a b JobState={} Reason=None Restarts=0 StartTime=900 EndTime={} PreemptEligibleTime=900 "
    "PreemptTime={}"
)
VARIABLES = {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1600", "ORTFLOW_KILL_WAIT": "5"}


@pytest.mark.parametrize(
    ("reason", "shown", "expected"),
    [
        ("SIGTERM", JOB.format("RUNNING", 1015, 1000), 20.0),  # a preemption with a grace of 15 s
        ("SIGUSR2", JOB.format("RUNNING", 1015, 1000), 20.0),  # the same with preempt_send_user_signal
        ("SIGTERM", JOB.format("COMPLETING", 1000, 1000), 5.0),  # one without grace
        ("SIGTERM", JOB.format("CANCELLED", 1000, "None"), 5.0),
        ("SIGTERM", JOB.format("PENDING", "Unknown", "None"), 5.0),  # queued again
        ("SIGUSR2", JOB.format("RUNNING", 1090, "None"), 90.0),  # ahead of the time limit, which was changed
        ("SIGTERM", "", 5.0),  # no answer
        ("SIGUSR2", "", 600.0),
    ],
)
def test_the_seconds_after_a_signal(reason: str, shown: str, expected: float) -> None:
    assert after_signal(reason, shown, VARIABLES, 1000.0) == expected


def test_nothing_is_known_outside_slurm() -> None:
    assert (ask_slurm("SIGTERM", {}), job_end({}, 0.0), after_signal("SIGTERM", "", {}, 0.0)) == (None, None, None)
    assert ask_slurm("stop file", VARIABLES) is None
    assert job_end(VARIABLES, 1000.0) == 600.0


def test_the_launcher_sets_what_slurm_does_not() -> None:
    fake = Fake(config="KillWait                = 7 sec\n")
    assert deadlines(fake.slurm, {"SLURM_JOB_ID": "1"})["ORTFLOW_KILL_WAIT"] == "7"
    assert "SLURM_JOB_END_TIME" not in deadlines(fake.slurm, VARIABLES)
    assert deadlines(Fake(away=DEAD).slurm, {"SLURM_JOB_ID": "1"}) == {}
