"""Messages for why a job waits, and for sbatch's refusals, with what to change."""

from __future__ import annotations

import subprocess

import pytest

from ortflow.launchers.slurm.jobs import Job
from ortflow.launchers.slurm.reasons import explain, waits
from ortflow.launchers.slurm.refusals import refusal

NEVER = "will never start by itself"


def job(reason: str, state: str = "PENDING", **fields: object) -> Job:
    return Job(id="12", array=None, state=state, reason=reason, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "reason",
    ["DependencyNeverSatisfied", "JobHeldUser", "JobHeldAdmin", "PartitionNodeLimit", "PartitionTimeLimit",
     "PartitionConfig", "BadConstraints", "InvalidQOS", "InvalidAccount", "AccountNotAllowed", "JobHoldMaxRequeue",
     "launch failed requeued held", "job requeued in held state", "ReservationDeleted",
     "AssocMaxWallDurationPerJobLimit", "QOSMaxWallDurationPerJobLimit", "QOSMaxCpuPerJobLimit", "QOSMaxGRESPerJob",
     "QOSMaxMemoryPerNode", "QOSMinCpuNotSatisfied", "AssocMaxCpuPerJobLimit", "MaxMemPerLimit", "QOSTimeLimit",
     "AssocGrpCPUMinutesLimit", "QOSGrpBillingMinutes"],
)  # fmt: skip
def test_what_waiting_does_not_end(reason: str) -> None:
    reported = waits(job(reason))
    assert reported.startswith(NEVER)
    assert "; " in reported, "the fix"
    assert "JOB" not in reported


@pytest.mark.parametrize(
    "reason",
    ["", "Resources", "Priority", "Dependency", "BeginTime", "PartitionDown", "PartitionInactive", "Licenses",
     "Reservation", "Cleaning", "NodeDown", "ReqNodeNotAvail", "ReqNodeNotAvail, UnavailableNodes:node[1-2]",
     "ReqNodeNotAvail, May be reserved for other job", "QOSMaxJobsPerUserLimit", "QOSMaxCpuPerUserLimit",
     "QOSGrpCpuLimit", "AssocGrpNodeLimit", "AssocMaxJobsLimit", "QOSMaxNodePerUserLimit", "MaxCpuPerAccount",
     "QOSMaxGRESPerAccount", "JobArrayTaskLimit", "SomethingNewOfSlurm99",
     "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions"],
)  # fmt: skip
def test_what_waiting_may_end(reason: str) -> None:
    assert NEVER not in waits(job(reason))


def test_messages_name_their_subject() -> None:
    assert "node[1-2]" in waits(job("ReqNodeNotAvail, UnavailableNodes:node[1-2]"))
    assert "reserved" in waits(job("ReqNodeNotAvail, May be reserved for other job"))
    assert "QOS" in waits(job("QOSGrpCpuLimit"))
    assert "account" in waits(job("AssocGrpCpuLimit"))
    assert "resources.nodes" in waits(job("PartitionNodeLimit"))
    assert "resources.time_limit" in waits(job("PartitionTimeLimit"))
    assert "SomethingNewOfSlurm99" in waits(job("SomethingNewOfSlurm99"))
    assert "scontrol release 12" in waits(job("launch failed requeued held"))
    assert "afterok:7" in waits(job("Dependency", dependency="afterok:7(unfulfilled)"))


def test_the_pause_after_a_restart_is_not_an_expected_start() -> None:
    assert "delays its next start" in waits(job("BeginTime", restarts=1))
    assert "delays its next start" not in waits(job("BeginTime"))


def test_a_held_job_is_reported_by_its_state_too() -> None:
    assert NEVER in waits(job("", state="REQUEUE_HOLD"))


def test_a_reason_in_brackets_is_the_same() -> None:
    assert explain("(Resources)") == explain("Resources")


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("invalid partition specified: nope; Batch job submission failed: Invalid partition name specified",
         "backends.slurm.partition"),
        ("Batch job submission failed: Invalid qos specification", "backends.slurm.qos"),
        ("Batch job submission failed: Invalid account or account/partition combination specified",
         "backends.slurm.account"),
        ("Memory specification can not be satisfied; Batch job submission failed: Requested node configuration is not "
         "available", "resources.memory"),
        ("CPU count per node can not be satisfied; Batch job submission failed: Requested node configuration is not "
         "available", "resources.cpus_per_rank"),
        ("Batch job submission failed: Requested node configuration is not available", "resources"),
        ("Batch job submission failed: Invalid node name specified", "backends.slurm.nodelist"),
        ("Batch job submission failed: Invalid feature specification", "backends.slurm.constraint"),
        ("Batch job submission failed: Requested reservation is invalid", "backends.slurm.reservation"),
        ("Batch job submission failed: Invalid job array specification", None),
        ("Batch job submission failed: Requested time limit is invalid (missing or exceeds some limit)",
         "resources.time_limit"),
        ("Invalid --time specification", "resources.time_limit"),
        ("Invalid time specification (pos=0): xyz; Invalid --begin specification", "backends.slurm.begin"),
        ("sbatch: unrecognized option '--bogus'; Try \"sbatch --help\" for more information",
         "backends.slurm.directives"),
        ("Batch job submission failed: Job dependency problem", "backends.slurm.dependency"),
        ("Invalid --mail-type specification", "backends.slurm.mail.types"),
        ("Invalid --mem specification", "resources.memory"),
        ("Batch job submission failed: Node count specification invalid", "resources"),
        ("Maximum node count 1 is less than minimum node count 2", "resources"),
        ("Invalid --signal specification", "backends.slurm.signal_seconds"),
        ("Batch job submission failed: Invalid license specification", "backends.slurm.directives"),
        ("Invalid --exclusive specification", "backends.slurm.directives"),
        ("Batch job submission failed: Job violates accounting/QOS policy (job submit limit, user's size and/or time "
         "limits)", None),
        ("Batch job submission failed: Pathname of a file, directory or other parameter too long", "backends.slurm"),
        ("This does not look like a batch script.  The first; line must start with #! followed by the path to an "
         "interpreter.", "backends.slurm.prologue"),
        ("Batch job submission failed: User's group not permitted to use this partition", "backends.slurm.partition"),
        ("Batch job submission failed: Invalid generic resource (gres) specification", "resources.ranks_per_node"),
        ("Batch job submission failed: Something that nobody has seen", None),
    ],
)  # fmt: skip
def test_what_sbatch_refuses(words: str, key: str | None) -> None:
    error = refusal(words)
    assert error.where == key
    assert error.fix
    assert error.exit_code == 2
    assert words.replace("Batch job submission failed: ", "") in str(error)


def test_commands_that_are_recommended_can_be_typed() -> None:
    for words in ("Invalid partition", "Invalid feature specification", "Invalid job array specification"):
        fix = refusal(words).fix or ""
        command = fix.partition("`")[2].partition("`")[0]
        assert subprocess.run(["bash", "-n", "-c", command]).returncode == 0
