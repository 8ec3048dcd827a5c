"""How the batch step of a Slurm job interprets Slurm's output: all samples are from a real Slurm 22.05."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from messages import mentions, says

from ortflow.launchers.batch.current_job import Fate
from ortflow.launchers.batch.job_validity import revoked
from ortflow.launchers.records import Outcome
from ortflow.launchers.slurm.current_job import fate_of
from ortflow.launchers.slurm.jobs import read_scontrol, read_seconds
from ortflow.launchers.slurm.mpirun_output import lost_node
from ortflow.launchers.slurm.run_supervisor import placement_of
from ortflow.launchers.slurm.srun_output import cancelled, first_end, never_launched, taken_away, verdict
from ortflow.workflow.ranks import Place
from ortflow.workflow.run.rundir import RunDir

KILLED = """\
srun: error: node2: task 3: Killed
srun: launch/slurm: _step_signal: Terminating StepId=55269464.0
slurmstepd-node1: error: *** STEP 55269464.0 ON node1 CANCELLED AT 2026-11-21T13:59:34 ***
srun: error: node2: task 2: Killed
srun: error: node1: tasks 0-1: Killed
srun: Force Terminated StepId=55269464.0
"""
LEFT = """\
srun: error: node1: tasks 0-1: Exited with exit code 75
srun: launch/slurm: _step_signal: Terminating StepId=7.0
srun: error: node2: tasks 2-3: Killed
"""
OUT_OF_MEMORY = """\
slurmstepd-node1: error: Detected 1 oom-kill event(s) in StepId=7.0. Some of your processes may have been killed by \
the cgroup out-of-memory handler.
srun: error: node1: task 1: Out Of Memory
srun: error: node2: tasks 2-3: Killed
"""
NO_PYTHON = """\
slurmstepd-node2: error: execve(): /data/venv/bin/python: No such file or directory
slurmstepd-node2: error: execve(): /data/venv/bin/python: No such file or directory
srun: error: node2: tasks 2-3: Exited with exit code 2
srun: error: node1: tasks 0-1: Terminated
srun: Force Terminated StepId=7.0
"""
NODE_LOST = """\
srun: error: Node failure on node2
srun: Job step aborted: Waiting up to 7 seconds for job step to finish.
srun: error: node1: tasks 0-1: Exited with exit code 75
"""
NOT_LAUNCHED = "srun: error: task 2 launch failed: Slurmd could not connect IO\n" * 2
NO_ANSWER = """\
srun: error: Task launch for StepId=7.1 failed on node node1: Communication connection failure
srun: error: Application launch failed: Communication connection failure
srun: Job step aborted: Waiting up to 7 seconds for job step to finish.
srun: error: node2: tasks 2-3: Killed
srun: launch/slurm: _step_signal: Terminating StepId=7.1
"""
"""Of a node whose slurmd is dead, before the controller has noticed."""
PROLOG = NO_ANSWER.replace("Communication connection failure", "Slurmd could not set up environment for batch job")
ABORTED = """\
srun: Job step aborted: Waiting up to 7 seconds for job step to finish.
slurmstepd-node1: error: *** STEP 7.0 ON node1 CANCELLED AT 2026-11-21T14:03:34 ***
srun: error: node2: tasks 2-3: Killed
srun: launch/slurm: _step_signal: Terminating StepId=7.0
srun: error: node1: tasks 0-1: Killed
"""
UNSEEN = """\
error: node2 does not see the run directory /data/runs/a: it must be on storage that every node mounts
srun: error: node2: tasks 2-3: Exited with exit code 2
"""

MPIRUN_LOST = """\
[mpiexec@node1] control_cb (/mpich-5.0.2/src/pm/hydra/mpiexec/pmiserv_cb.c:280): assert (!closed) failed
[mpiexec@node1] HYDT_dmxu_poll_wait_for_event (/mpich-5.0.2/src/pm/hydra/lib/tools/demux/demux_poll.c:76): callback \
returned error status
[mpiexec@node1] HYD_pmci_wait_for_completion (/mpich-5.0.2/src/pm/hydra/mpiexec/pmiserv_pmci.c:180): error waiting for \
event
[mpiexec@node1] main (/mpich-5.0.2/src/pm/hydra/mpiexec/mpiexec.c:270): process manager error waiting for completion
"""
"""Of mpirun under Slurm, four seconds after a node had been switched off."""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (KILLED, {3: -signal.SIGKILL}),
        (LEFT, {0: 75}),
        (OUT_OF_MEMORY, {1: -signal.SIGKILL}),
        ("srun: error: node1: task 0: Segmentation fault (core dumped)\n", {0: -signal.SIGSEGV}),
        ("srun: error: node1: tasks 1,3: Exited with exit code 2\n", {1: 2}),
        (ABORTED, {}),
        ("", {}),
    ],
)
def test_the_first_task_that_srun_reports_is_the_cause(words: str, expected: dict[int, int]) -> None:
    assert first_end(words) == expected


def test_mpirun_loses_a_node() -> None:
    found = lost_node("mpich", MPIRUN_LOST, 255)
    assert found is not None
    assert (found.outcome, found.sentence) == (Outcome.LOST, "mpirun has lost the connection to a node")
    # A rank has ended first, and its node's process with it; ranks have saved; a message of something else.
    ended = "=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n=   PID 7 RUNNING AT node2\n=   EXIT CODE: 9\n"
    assert lost_node("mpich", ended + MPIRUN_LOST, 9) is None
    assert lost_node("mpich", MPIRUN_LOST, 75) is None
    assert lost_node("mpich", "control_cb\n", 255) is None
    assert lost_node("openmpi", MPIRUN_LOST, 255) is None


def test_ranks_that_left_or_were_killed_give_no_verdict() -> None:
    assert verdict(LEFT, 75) is None
    assert verdict(KILLED, 137) is None


@pytest.mark.parametrize(
    ("words", "outcome", "reported"),
    [
        (OUT_OF_MEMORY, Outcome.FAILURE, "rank 1 … SIGKILL … out of memory"),
        (NO_PYTHON, Outcome.USER_ERROR, "/data/venv/bin/python … node2"),
        (NODE_LOST, Outcome.LOST, "node node2 was lost"),
        (NO_ANSWER, Outcome.LOST, "node1 … did not answer … Communication connection failure"),
        (PROLOG, Outcome.FAILURE, "could not launch … Slurmd could not set up environment"),
        (NOT_LAUNCHED, Outcome.FAILURE, "Slurmd could not connect IO"),
        (UNSEEN, Outcome.USER_ERROR, "node2 does not see the run directory"),
        ("srun: error: Invalid MPI type 'pmix', --mpi=list for acceptable types\n", Outcome.USER_ERROR, "--mpi=pmix"),
    ],
)
def test_states_that_only_slurm_reports(words: str, outcome: Outcome, reported: str) -> None:
    found = verdict(words, 1)
    assert found is not None
    assert found.outcome is outcome
    assert mentions(found.sentence, reported)


def test_a_step_that_was_cancelled_alone() -> None:
    found = cancelled(ABORTED, 137)
    assert found is not None
    assert says(found.sentence, "… step 7.0 was cancelled … the job was not")
    assert cancelled(ABORTED, 75) is None, "they saved and stopped"
    assert cancelled(KILLED, 137) is None
    assert cancelled(f"{KILLED}{ABORTED}", 137) is None, "ended because of a rank"
    preempted = ABORTED.replace("03:34 ***", "03:34 DUE TO PREEMPTION ***")
    assert cancelled(preempted, 137) is None


SUBMITTING = {"event": "submitting", "launcher": "slurm", "submission": "a1"}
SUBMIT = {"event": "submit", "launcher": "slurm", "submission": "a1", "job": "7"}
AGAIN = {"event": "submit", "launcher": "slurm", "submission": "b2", "job": "8"}
FOLLOWS = {"event": "submit", "launcher": "slurm", "job": "9", "follows": "7"}
CANCELLED = {"event": "stop", "outcome": "preempted", "asked": "cancel", "why": "requested by ortflow cancel"}


@pytest.mark.parametrize(
    ("records", "job", "comment", "reported"),
    [
        ([SUBMITTING, SUBMIT], "7", "ortflow a1", None),
        ([SUBMITTING], "7", "ortflow a1", None),  # before the submitter has sbatch's answer
        ([SUBMITTING], "7", "", None),  # a site that keeps no comments
        ([SUBMITTING, SUBMIT, FOLLOWS], "9", "ortflow a1", None),
        ([SUBMITTING, SUBMIT, AGAIN], "7", "ortflow a1", "submitted again since, as job 8"),
        ([SUBMITTING, SUBMIT, AGAIN], "7", "", "submitted again since, as job 8"),
        ([SUBMITTING, SUBMIT, CANCELLED], "7", "ortflow a1", "has ended: requested by ortflow cancel"),
        ([SUBMITTING, SUBMIT, CANCELLED, {**SUBMITTING, "submission": "b2"}], "8", "ortflow b2", None),
    ],
)
def test_a_job_whose_run_has_gone_on_without_it_leaves(
    records: list[dict[str, Any]], job: str, comment: str, reported: str | None
) -> None:
    why = revoked(records, "slurm", job, comment)
    assert why is None if reported is None else reported in (why or "")


def test_a_rank_that_was_never_launched_is_missed() -> None:
    assert never_launched(NOT_LAUNCHED) == {2}
    assert never_launched(KILLED) == set()


def fate(fields: str, restarts: int) -> Fate:
    (job,) = read_scontrol(f"JobId=7 JobName=a UserId=root(0) {fields} ExitCode=0:0")
    return fate_of(job, restarts)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        # Each row: the event, seen from inside the job.
        ("JobState=COMPLETING Reason=None Restarts=2 PreemptTime=None", Fate.QUEUED),  # requeue, preemption, lost node
        ("JobState=RUNNING Reason=None Restarts=1 PreemptTime=2026-11-21T13:59:34", Fate.PREEMPTED),  # grace
        ("JobState=COMPLETING Reason=None Restarts=1 PreemptTime=2026-11-21T13:59:34", Fate.PREEMPTED),  # Requeue=0
        ("JobState=COMPLETING Reason=TimeLimit Restarts=1 PreemptTime=None", Fate.TIME_LIMIT),
        ("JobState=COMPLETING Reason=None Restarts=1 PreemptTime=None", Fate.CANCELLED),  # scancel
        ("JobState=CANCELLED Reason=None Restarts=1 PreemptTime=None", Fate.CANCELLED),
        ("JobState=RUNNING Reason=None Restarts=1 PreemptTime=None", Fate.RUNNING),  # a signal by hand
        ("JobState=RUNNING Reason=None Restarts=2 PreemptTime=None", Fate.QUEUED),  # a newer start of this job runs
    ],
)
def test_what_slurm_is_doing_with_the_job(fields: str, expected: Fate) -> None:
    assert fate(fields, restarts=1) is expected


@pytest.mark.parametrize(
    ("why", "sentence"),
    [
        ("Unable to contact slurm controller (connect failure)", "… controller did not answer"),
        ("Job is pending execution", "… controller has lost … Job is pending execution"),
    ],
)
def test_an_unconfirmed_allocation_is_not_a_failure_of_the_run(why: str, sentence: str) -> None:
    words = (
        f"srun: error: Unable to confirm allocation for job 55: {why}\n"
        "srun: Check SLURM_JOB_ID environment variable. Expired or invalid job 55\n"
    )
    found = verdict(words, 1)
    assert found is not None
    assert found.outcome is Outcome.LOST
    assert says(found.sentence, sentence)


@pytest.mark.parametrize(
    ("due", "why"),
    [
        ("DUE TO JOB REQUEUE", "a user requeued the job"),
        ("DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS", "a node of the job was lost"),
        ("DUE TO PREEMPTION", None),
        ("DUE TO TIME LIMIT", None),
    ],
)
def test_who_has_taken_the_job_away(due: str, why: str | None) -> None:
    words = f"slurmstepd-n1: error: *** STEP 5.0 ON n1 CANCELLED AT 2026-11-23T03:28:09 {due} ***\nsrun: got SIGCONT\n"
    assert taken_away(words) == why


def test_a_job_that_waits_with_our_count_of_restarts_comes_back() -> None:
    """Its controller died before it had saved the start."""
    assert fate("JobState=PENDING Reason=None Restarts=0", restarts=0) is Fate.QUEUED


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1-02:03:04", 93784.0), ("2:03:04", 7384.0), ("1:05", 65.0), ("0:00", 0.0), ("UNLIMITED", None), ("", None)],
)
def test_the_time_that_is_left(text: str, seconds: float | None) -> None:
    assert read_seconds(text) == seconds


@pytest.mark.parametrize(
    ("launch", "start", "kind"),
    [
        (["srun", "--mpi=pmi2", "python"], "pmi2", "mpich"),
        (["srun", "--mpi=pmix", "python"], "pmix", "openmpi"),
        (["/opt/bin/mpirun", "--map-by", "ppr:2:node", "python"], "mpirun", "openmpi"),
        (["/opt/bin/mpirun", "-ppn", "2", "python"], "mpirun", "mpich"),
    ],
)
def test_how_ranks_are_started_is_read_back_from_the_script(launch: list[str], start: str, kind: str) -> None:
    placement = placement_of(RunDir(Path("/runs/a")), launch)
    assert (placement.start, placement.kind) == (start, kind)


def test_a_rank_under_srun_and_mpich_has_its_local_rank() -> None:
    environment = {
        "PMI_RANK": "3",
        "PMI_SIZE": "5",
        "SLURM_PROCID": "3",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "1",
        "SLURM_STEP_NUM_TASKS": "5",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    }
    place = Place.from_environment(environment)
    assert (place.rank, place.world_size, place.local_rank, place.local_size) == (3, 5, 1, 2)
    assert place.manager == "MPICH"
    assert Place.from_environment({**environment, "SLURM_NODEID": "2"}).local_size == 1
