"""Whatever Slurm, its nodes and the ranks do: the result is that of an undisturbed run, bit for bit.

Tests that are similar to another are marked `chaos`: they are slow, and not part of a plain `pytest`.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
from cluster import ENDS, PACE, SHAPE, Cluster, Run, both, faults, rank_processes, same_end, skewed, slow
from messages import mentions, says
from project import curve, events, of_kind
from testbed import Testbed, wait_until

MIDDLE = 8
"""A step at which there is a checkpoint, and much is still to come."""


def test_preempted_with_grace_and_without(cluster_of: Cluster, undisturbed: Run) -> None:
    testbed = cluster_of.testbed
    run = cluster_of.submit("preempted", **slow(0.3, attempts=2))
    run.until_step(MIDDLE, ENDS)
    testbed.preempt(run.job, seconds=3)
    run.until_step(MIDDLE + 10, ENDS)
    testbed.grace(15)
    testbed.preempt(run.job, seconds=3)
    run.finish()
    same_end(run, undisturbed)
    assert run.restarts == 2
    assert run.outcomes() == ["preempted", "preempted", "finished"]
    assert not of_kind(run.run_dir, "rewind"), "it saved when it was asked"
    assert run.status()["preemptions"] == 2
    assert run.status()["failures"] == 0


@pytest.mark.chaos
def test_requeued_by_an_administrator(cluster_of: Cluster, undisturbed: Run) -> None:
    run = cluster_of.submit("requeued", **slow(PACE, attempts=1))
    run.until_step(MIDDLE)
    cluster_of.testbed.reported("scontrol", "requeue", run.job)
    run.finish()
    same_end(run, undisturbed)
    assert run.restarts == 1
    assert run.outcomes() == ["preempted", "finished"]
    assert not of_kind(run.run_dir, "rewind")
    assert run.records("end")[0]["cause"] == "saved and stopped: a user requeued the job"
    assert run.status()["preemptions"] == 0


@pytest.mark.chaos
def test_time_limit(cluster_of: Cluster, undisturbed: Run) -> None:
    """A run that needs more time than its jobs have: Slurm's signal comes up to a minute ahead of the end."""
    limit = {"resources__time_limit": "00:01:00", "backends__slurm__signal_seconds": 30}
    run = cluster_of.submit("in-pieces", **limit, **slow(0.9))
    run.finish(timeout=300)
    same_end(run, undisturbed)
    assert run.restarts >= 1
    assert set(run.outcomes()[:-1]) == {"preempted"}
    assert not of_kind(run.run_dir, "rewind")


@pytest.mark.rotates("Slurm restarts")
@pytest.mark.parametrize(
    "which", [pytest.param(0, id="the batch step's"), pytest.param(1, id="the other", marks=pytest.mark.chaos)]
)
def test_node_off(cluster_of: Cluster, undisturbed: Run, which: int) -> None:
    testbed = cluster_of.testbed
    run = cluster_of.submit(f"node-off-{which}", **slow(PACE, attempts=1))
    run.until_step(MIDDLE)
    testbed.node("off", testbed.hosts(run.job)[which])
    run.finish()
    same_end(run, undisturbed)
    assert run.restarts == 1
    assert "failure" not in run.outcomes(), "a lost node is not the run's fault"


@pytest.mark.rotates("Slurm restarts")
def test_two_starts_of_one_job_overlap(cluster_of: Cluster, undisturbed: Run) -> None:
    """The daemon of the batch step's node dies and its processes survive: Slurm starts the job elsewhere."""
    testbed = cluster_of.testbed
    run = cluster_of.submit("two-lives", **slow(2.0, attempts=1))
    run.until_step(5)
    old = rank_processes(run.run_dir)
    testbed.node("slurmd-kill", testbed.hosts(run.job)[0])
    wait_until(lambda: run.restarts == 1, 120, run.transcript)  # its second life may be over in seconds
    run.finish()
    same_end(run, undisturbed)
    assert not any(process.is_running() for process in old.values())
    # They stopped early, and said why: both starts ran at the same time.
    assert max(r["step"] for r in events(run.run_dir) if r["event"] == "step" and r["attempt"] == 0) < 35
    assert mentions(run.log(), "newer job … owns the run directory")


@pytest.mark.chaos
def test_rank_0_is_killed(cluster_of: Cluster, undisturbed: Run) -> None:
    run = cluster_of.submit("killed-0", **slow(PACE, attempts=1))
    run.until_step(MIDDLE)
    rank_processes(run.run_dir)[0].kill()
    run.finish()
    same_end(run, undisturbed)
    assert run.records("end")[0]["cause"] == "rank 0 was killed by SIGKILL"
    # Each node has a /dev/shm of its own.
    look = "ls /dev/shm | grep -E '^(ortflow_mpi|mpich)_' || true"
    left = {node: run.testbed.node("exec", node, "sh", "-c", look) for node in run.testbed.hosts(run.job)}
    assert set(left.values()) == {""}, left


@pytest.mark.rotates("Slurm restarts")
def test_four_failures_of_one_run(cluster_of: Cluster, undisturbed: Run) -> None:
    """A rank is killed, another raises, the step is cancelled, a rank freezes while the others wait for it."""
    restart = {"failures": 4, "hung_seconds": 20.0, "backoff": {"first": 0.0, "limit": 0.0}}
    odd = both(slow(0.3), faults(2, MIDDLE + 5, "raise", attempt=1))
    run = cluster_of.submit("four-failures", restart=restart, **odd)
    run.until_step(MIDDLE, ENDS)
    rank_processes(run.run_dir)[3].kill()
    run.until_attempt(2, MIDDLE + 7)
    run.testbed.reported("scancel", f"{run.job}.2")
    run.until_attempt(3, MIDDLE + 9)
    rank_processes(run.run_dir)[1].suspend()  # a second blame for the node of rank 3 would exclude it
    run.finish()
    same_end(run, undisturbed)
    killed, raised, cancelled, hung, last = run.records("end")
    assert [(end["outcome"], end["rank"]) for end in (killed, raised)] == [("failure", 3), ("failure", 2)]
    assert "rank 3 was killed by SIGKILL" in killed["cause"]
    assert "this rank was told to raise" in raised["cause"]
    assert says(cancelled["cause"], f"… step {run.job}.2 was cancelled … the job was not"), run.transcript()
    assert "hung: no heartbeat for 20 s" in hung["cause"]
    assert last["outcome"] == "finished"
    assert run.restarts == 0, "within the allocation"


@pytest.mark.rotates("Slurm restarts")
def test_a_node_whose_clock_is_two_hours_ahead(cluster_of: Cluster, undisturbed: Run) -> None:
    """Compared with its clock every heartbeat is old."""
    ahead = skewed("ortflow.launchers.slurm.run_supervisor", 7200)
    restart = {**SHAPE["restart"], "hung_seconds": 600.0}
    run = cluster_of.run("ahead", restart=restart, **ahead)
    same_end(run, undisturbed)
    assert run.outcomes() == ["finished"]
    assert run.records("start")[0]["time"] > time.time() + 3600, "its clock was ahead"


@pytest.mark.skipif(not os.path.isdir("/sys/fs/cgroup/memory"), reason="needs cgroup version 1")
def test_out_of_memory(cluster_of: Cluster, undisturbed: Run) -> None:
    run = cluster_of.run("out-of-memory", **faults(3, MIDDLE, "hog"))
    same_end(run, undisturbed)
    first, second = run.records("end")
    assert (first["outcome"], first["rank"], second["outcome"]) == ("failure", 3, "finished")
    assert "out of memory" in first["cause"]


@pytest.mark.rotates("Slurm restarts")
@pytest.mark.parametrize("how", [pytest.param("stop", marks=pytest.mark.chaos), "kill"])
def test_the_controller_is_restarted(cluster_of: Cluster, undisturbed: Run, how: str) -> None:
    testbed = cluster_of.testbed
    # Slurm saves its state only every 5 s: a controller that is killed before that starts the job again.
    run = cluster_of.submit(f"controller-{how}", **slow(0.6, attempts=1))
    run.until_step(MIDDLE)
    testbed.controller(how)
    run.until_step(MIDDLE + 5)
    testbed.controller("start")
    run.finish()
    same_end(run, undisturbed)
    assert len(curve(run.run_dir)) == SHAPE["train__steps"]


@pytest.mark.chaos
def test_a_controller_that_is_away_when_the_ranks_have_left(cluster_of: Cluster, undisturbed: Run) -> None:
    """The signal has arrived, the ranks have saved, and the controller cannot take the requeue request."""
    testbed = cluster_of.testbed
    run = cluster_of.submit("away", **slow(0.6))
    run.until_step(MIDDLE)
    testbed.controller("kill")
    for process in rank_processes(run.run_dir).values():
        process.terminate()
    wait_until(lambda: run.outcomes() == ["preempted"], 120, run.transcript)
    testbed.controller("start")
    run.finish()
    same_end(run, undisturbed)


@pytest.mark.rotates("Slurm restarts")
def test_a_controller_that_is_away_when_ranks_start(cluster_of: Cluster, undisturbed: Run) -> None:
    """srun cannot confirm its allocation: not a failure of the run, and the failure budget is not spent."""
    testbed = cluster_of.testbed
    # Slurm saves its state only every 5 s.
    slowly = {"backends__slurm__prologue": ["sleep 14"]}
    run = cluster_of.submit("nobody-confirms", restart={**SHAPE["restart"], "failures": 0}, **slowly)
    wait_until(lambda: testbed.state(run.job) == "RUNNING", 120, run.transcript)
    time.sleep(7)
    testbed.controller("kill")
    wait_until(lambda: run.outcomes() == ["lost"], ENDS, run.transcript)
    testbed.controller("start")
    run.finish()
    same_end(run, undisturbed)
    assert run.outcomes() == ["lost", "finished"]
    assert "Slurm controller did not answer" in run.records("end")[0]["cause"]


def test_budget_is_spent(cluster_of: Cluster) -> None:
    """A rank that fails in every attempt: the run gives up within the allocation, and reports it."""
    run = cluster_of.submit("hopeless", restart={"failures": 0}, **faults(1, 3, "raise"))
    reported = run.until_state("failed")
    assert "this rank was told to raise" in reported["cause"]
    assert cluster_of.testbed.ended(run.job, 20)["JobState"] == "FAILED"
    assert run.restarts == 0


def test_venv_missing_on_one_node(cluster_of: Cluster) -> None:
    testbed = cluster_of.testbed
    run = _on_two(cluster_of, testbed, "no-venv", Path(sys.prefix))
    reported = run.until_state("failed")
    assert "cannot be run on" in reported["cause"]
    assert "resources.python" in reported["cause"]
    assert len(run.outcomes()) <= 1, "retrying would not help"


def test_run_directory_missing_on_one_node(cluster_of: Cluster) -> None:
    testbed = cluster_of.testbed
    run = _on_two(cluster_of, testbed, "no-folder", cluster_of.project.folder / "runs")
    reported = run.until_state("failed")
    assert "no-folder" in reported["cause"]
    assert "every node" in reported["cause"]


def _on_two(cluster: Cluster, testbed: Testbed, name: str, path: Path) -> Run:
    """Submit to two nodes of which the second sees nothing in `path`; wait until the job has ended."""
    first, second = testbed.nodes[:2]
    path.mkdir(exist_ok=True)
    with testbed.lacking(second, path):
        run = cluster.submit(name, backends__slurm__nodelist=f"{first},{second}")
        testbed.ended(run.job, 60)
    return run
