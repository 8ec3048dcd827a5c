"""How long a program has to stop, from what Slurm 22.05 reports of a preempted job and of its site."""

from __future__ import annotations

import pytest
from fake_slurm import DEAD, Fake

from ortflow.launchers.slurm.deadlines import deadlines, kill_seconds
from ortflow.launchers.slurm.site import read_config, read_partitions
from ortflow.workflow.program.deadline import slurm_seconds

CONFIG = "KillWait                = 5 sec\nPreemptMode             = REQUEUE\nPreemptType             = {}\n"
PARTITION = (
    "PartitionName=main AllowGroups=ALL Default=YES QoS=N/A DefaultTime=00:10:00 GraceTime=15 Hidden=NO "
    "MaxTime=UNLIMITED PriorityTier=10 PreemptMode={} State=UP TotalCPUs=16 TotalNodes=4\n"
)


@pytest.mark.parametrize(
    ("kind", "mode", "expected"),
    [
        ("preempt/partition_prio", "REQUEUE", 20.0),
        ("preempt/partition_prio", "OFF", 5.0),
        ("preempt/qos", "REQUEUE", 5.0),
        ("preempt/none", "OFF", 5.0),
    ],
)
def test_the_seconds_between_sigterm_and_sigkill(kind: str, mode: str, expected: float) -> None:
    config, places = read_config(CONFIG.format(kind)), read_partitions(PARTITION.format(mode))
    assert kill_seconds(config, places) == expected
    assert kill_seconds({}, []) == 30.0


@pytest.mark.parametrize(
    ("reason", "elapsed", "expected"),
    [
        (None, 0.0, 600.0),
        ("SIGTERM", 0.0, 20.0),
        ("SIGTERM", 8.0, 12.0),
        ("SIGUSR2", 0.0, 20.0),  # preempt_send_user_signal
        ("stop file", 5.0, 595.0),  # `ortflow cancel`
    ],
)
def test_a_preemption_counts_from_its_signal(reason: str | None, elapsed: float, expected: float) -> None:
    environment = {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1600", "ORTFLOW_KILL_SECONDS": "20"}
    assert slurm_seconds(environment, 90.0, reason, 1000.0 + elapsed, 1000.0) == expected


def test_the_signal_ahead_of_the_limit_counts_from_the_limit() -> None:
    environment = {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1100", "ORTFLOW_KILL_SECONDS": "20"}
    assert slurm_seconds(environment, 90.0, "SIGUSR2", 1040.0, 1000.0) == 60.0
    assert slurm_seconds({}, 90.0, "SIGTERM", 1000.0, 1000.0) is None


def test_slurm_that_does_not_answer_gives_no_deadline() -> None:
    assert deadlines(Fake(away=DEAD).slurm, {"SLURM_JOB_ID": "1"}) == {}
