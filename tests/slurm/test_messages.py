"""Faults that are easily confused with others: the cause that is reported is the one that was injected."""

from __future__ import annotations

import os
import signal

import pytest
from cluster import ENDS, Cluster, Run, rank_processes, same_end, slow
from messages import mentions, says
from project import of_kind
from testbed import FINAL, wait_until


def test_the_batch_script_is_killed(cluster_of: Cluster) -> None:
    run = cluster_of.submit("script-killed", **slow(0.3))
    run.until_step(3, ENDS)
    run.testbed.reported("scancel", "-s", "KILL", "-b", run.job)
    wait_until(lambda: run.testbed.state(run.job) in FINAL, ENDS)
    reported = run.status()
    assert reported["state"] == "lost"
    assert "script was killed by SIGKILL" in reported["cause"]
    assert "could not write" not in reported["cause"]


def test_a_held_job_has_no_expected_start(cluster_of: Cluster) -> None:
    run = cluster_of.submit("held", **slow(0.3))
    run.until_step(3, ENDS)
    run.testbed.reported("scontrol", "requeue", run.job)
    wait_until(lambda: run.testbed.state(run.job) == "PENDING", 120)
    run.testbed.reported("scontrol", "hold", run.job)
    reported = run.status()
    assert mentions(reported["waits"], "never start", "held")
    assert reported["starts_at"] is None
    shown = cluster_of.ortflow("status", "held").stdout
    assert "expected" not in shown


def test_only_the_run_file_is_gone(cluster_of: Cluster) -> None:
    run = cluster_of.submit("no-run-file", **slow(0.3))
    run.until_step(3, ENDS)
    (run.run_dir / "run.yaml").unlink()
    os.kill(rank_processes(run.run_dir)[1].pid, signal.SIGKILL)
    wait_until(lambda: any(record["next"] == "stop" for record in run.records("end")), ENDS, run.transcript)
    cause = run.records("end")[-1]["cause"]
    assert f"finds no {run.run_dir}/run.yaml" in cause
    assert "every node" not in cause
    done = cluster_of.ortflow("status", "no-run-file")
    assert done.returncode == 2
    assert "has no run.yaml" in done.stderr


def test_more_nodes_are_named_than_the_run_has(cluster_of: Cluster) -> None:
    nodes = ",".join(cluster_of.testbed.nodes[:3])
    file = cluster_of.write("named", backends__slurm__nodelist=nodes)
    done = cluster_of.ortflow("submit", "-b", "slurm", file.name)
    assert done.returncode == 2
    assert done.stderr.startswith("error: backends.slurm.nodelist: ")


@pytest.mark.rotates("Slurm restarts")
def test_signals_by_hand_are_not_a_preemption(cluster_of: Cluster, undisturbed: Run) -> None:
    """Sent to the ranks, and to the batch step."""
    run = cluster_of.submit("signals", **slow(0.2, attempts=3))
    for step, number, to in ((5, "USR2", []), (10, "USR1", []), (15, "USR1", ["-b"])):
        run.until_step(step, ENDS)
        run.testbed.reported("scancel", "-s", number, *to, run.job)
    run.finish()
    same_end(run, undisturbed)
    assert not of_kind(run.run_dir, "rewind"), "it saved"
    *ends, _ = run.records("end")
    assert len(ends) == 3
    for end in ends:
        assert says(end["cause"], "saved and stopped: … signal … by hand"), end
        assert end["why"] == "that counts against no budget"
    assert run.status()["preemptions"] == 0


@pytest.mark.rotates("Slurm restarts")
def test_a_time_limit_that_is_cut_while_the_job_runs(cluster_of: Cluster, undisturbed: Run) -> None:
    """Half of a minute is left for training; the usual lead of 90 seconds would leave nothing."""
    run = cluster_of.submit("cut", resources__time_limit="00:30:00", **slow(1.6, 1))
    run.until_step(3, ENDS)
    run.testbed.reported("scontrol", "update", f"jobid={run.job}", "TimeLimit=00:01:00")
    run.finish(timeout=400)
    same_end(run, undisturbed)
    ends = run.records("end")
    assert len(ends) > 1, run.transcript()
    assert all(mentions(end["cause"], "saved and stopped", "time limit") for end in ends[:-1]), run.transcript()
    assert not of_kind(run.run_dir, "rewind"), "each start of the job saved in time"
    assert run.status()["preemptions"] == 0
