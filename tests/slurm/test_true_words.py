"""Accidents that are easily taken for others: what is said of each is what was done."""

from __future__ import annotations

import os
import signal

from bed import FINAL, wait_until
from cluster import ENDS, Cluster, Run, rank_processes, same_end, slow
from project import of_kind


def test_the_batch_script_is_killed(cluster_of: Cluster) -> None:
    run = cluster_of.submit("script-killed", **slow(0.3))
    run.until_step(3, ENDS)
    run.bed.told("scancel", "-s", "KILL", "-b", run.job)
    wait_until(lambda: run.bed.state(run.job) in FINAL, ENDS)
    told = run.status()
    assert told["state"] == "lost"
    assert "script was killed by SIGKILL" in told["cause"]
    assert "could not write" not in told["cause"]


def test_a_job_that_is_held_is_expected_never(cluster_of: Cluster) -> None:
    run = cluster_of.submit("held", **slow(0.3))
    run.until_step(3, ENDS)
    run.bed.told("scontrol", "requeue", run.job)
    wait_until(lambda: run.bed.state(run.job) == "PENDING", 60)
    run.bed.told("scontrol", "hold", run.job)
    told = run.status()
    assert "will never start by itself: it is held" in told["waits"]
    assert told["starts_at"] is None
    shown = cluster_of.ortflow("status", "held").stdout
    assert "expected" not in shown


def test_only_the_run_file_is_gone(cluster_of: Cluster) -> None:
    run = cluster_of.submit("no-run-file", **slow(0.3))
    run.until_step(3, ENDS)
    (run.run_dir / "run.yaml").unlink()
    os.kill(rank_processes(run.run_dir)[1].pid, signal.SIGKILL)
    wait_until(lambda: any(record["next"] == "stop" for record in run.records("end")), ENDS, run.story)
    cause = run.records("end")[-1]["cause"]
    assert f"finds no {run.run_dir}/run.yaml" in cause
    assert "every node" not in cause
    done = cluster_of.ortflow("status", "no-run-file")
    assert done.returncode == 2
    assert "has lost its run.yaml" in done.stderr


def test_more_nodes_are_named_than_the_run_has(cluster_of: Cluster) -> None:
    nodes = ",".join(cluster_of.bed.nodes[:3])
    file = cluster_of.write("named", backends__slurm__nodelist=nodes)
    done = cluster_of.ortflow("submit", "-b", "slurm", file.name)
    assert done.returncode == 2
    assert done.stderr.startswith("error: backends.slurm.nodelist: ")


def test_signals_by_hand_are_no_preemption(cluster_of: Cluster, undisturbed: Run) -> None:
    """To the ranks, and to the batch step."""
    run = cluster_of.submit("signals", **slow(0.2))
    for step, to in ((7, []), (20, ["-b"])):
        run.until_step(step, ENDS)
        run.bed.told("scancel", "-s", "USR2", *to, run.job)
    run.finish()
    same_end(run, undisturbed)
    assert not of_kind(run.run_dir, "rewind"), "it saved"
    *ends, _ = run.records("end")
    assert len(ends) == 2
    for end in ends:
        assert end["cause"].startswith("saved and left: a signal was sent by hand"), end
        assert end["why"] == "that counts against no budget"
    assert run.status()["preemptions"] == 0


def test_a_time_limit_that_is_cut_while_the_job_runs(cluster_of: Cluster, undisturbed: Run) -> None:
    """Of a minute half is left for training; the usual lead of 90 seconds would leave nothing, life after life."""
    run = cluster_of.submit("cut", resources__time_limit="00:30:00", **slow(1.6, 1))
    run.until_step(3, ENDS)
    run.bed.told("scontrol", "update", f"jobid={run.job}", "TimeLimit=00:01:00")
    run.finish(timeout=400)
    same_end(run, undisturbed)
    ends = run.records("end")
    assert len(ends) > 1, run.story()
    assert {end["cause"] for end in ends[:-1]} == {"saved and left: the time limit is near"}, run.story()
    assert not of_kind(run.run_dir, "rewind"), "each life saved in time"
    assert run.status()["preemptions"] == 0
