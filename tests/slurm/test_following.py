"""What a person sees of a run in Slurm, and what they can do about it: status, logs, cancel, resume, chains."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from cluster import PACE, STARTS, Cluster, Counted, Run, both, same_end, slow
from messages import mentions
from project import ORTFLOW, of_kind
from testbed import FINAL, wait_until

LATER = {"backends__slurm__begin": "now+1hour"}
SHORT = {
    "train__steps": 4,
    "train__schedule": {"name": "constant"},
    "resources": {"nodes": 1, "ranks_per_node": 2, "cpus_per_rank": 1},
}
ANSWERS = 60.0
"""Seconds within which a dead or hung controller is told, on a loaded machine; its absence may last for ever."""


def in_queue(run: Run) -> bool:
    return run.job in run.testbed.reported("squeue", "-h", "-o", "%A").split()


def test_cancel_while_it_waits(cluster_of: Cluster) -> None:
    run = cluster_of.submit("waits", **LATER)
    reported = run.status()
    assert (reported["state"], reported["job"]) == ("pending", run.job)
    assert reported["waits"]
    assert reported["starts_at"] > time.time() + 3000
    done = cluster_of.ortflow("cancel", "waits")
    assert done.returncode == 0, done.stderr
    assert not in_queue(run)
    assert run.status()["state"] == "cancelled"


def test_cancel_saves_a_running_run_and_resume_continues(cluster_of: Cluster, undisturbed: Run) -> None:
    run = cluster_of.submit("stopped", **slow(0.2, attempts=1))
    run.until_step(8)
    done = cluster_of.ortflow("cancel", "stopped", timeout=90)
    assert done.returncode == 0, done.stderr
    assert run.status()["state"] == "cancelled"
    assert of_kind(run.run_dir, "preempted"), "it saved"
    assert run.testbed.ended(run.job, 30)["JobState"] == "CANCELLED"
    done = cluster_of.ortflow("resume", "stopped")
    assert done.returncode == 0, done.stderr
    run.finish()
    same_end(run, undisturbed)
    assert not of_kind(run.run_dir, "rewind")


@pytest.mark.chaos
def test_cancel_now(cluster_of: Cluster, undisturbed: Run) -> None:
    run = cluster_of.submit("stopped-now", **slow(0.5))
    run.until_step(7)
    done = cluster_of.ortflow("cancel", "--now", "stopped-now", timeout=90)
    assert done.returncode == 0, done.stderr
    assert run.status()["state"] == "cancelled"
    wait_until(lambda: not in_queue(run), 120)
    done = cluster_of.ortflow("resume", "stopped-now")
    assert done.returncode == 0, done.stderr


@pytest.mark.chaos
def test_cancel_between_two_lives(cluster_of: Cluster) -> None:
    run = cluster_of.submit("between", **slow(0.5))
    run.until_step(7)
    run.testbed.reported("scontrol", "requeue", run.job)
    reported = run.until_state("restarting", timeout=120)
    wait_until(lambda: run.testbed.state(run.job) == "PENDING", 120)
    reported = run.status()
    assert reported["state"] == "restarting"
    assert reported["waits"]
    assert reported["job_restarts"] == 1
    done = cluster_of.ortflow("cancel", "between")
    assert done.returncode == 0, done.stderr
    assert run.status()["state"] == "cancelled"
    time.sleep(8)
    assert not in_queue(run), "nobody starts it again"


def test_cancel_of_a_finished_run(cluster_of: Cluster, undisturbed: Run) -> None:
    done = cluster_of.ortflow("cancel", "undisturbed")
    assert done.returncode == 0
    assert "is not running: finished" in done.stdout


def test_scancel_is_not_a_preemption(cluster_of: Cluster, undisturbed: Run) -> None:
    """The batch step is signalled as for a preemption; asking to be queued again would undo the cancel."""
    run = cluster_of.submit("scancelled", **slow(PACE, attempts=1))
    run.until_step(8)
    run.testbed.reported("scancel", run.job)
    assert run.testbed.ended(run.job, 60)["JobState"] == "CANCELLED"
    assert run.status()["state"] == "cancelled"
    assert run.restarts == 0
    done = cluster_of.ortflow("resume", "scancelled")
    assert done.returncode == 0, done.stderr
    run.finish()
    same_end(run, undisturbed)
    assert not of_kind(run.run_dir, "rewind"), "it saved when it was told"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"resources": {"nodes": 9, "ranks_per_node": 1}}, "nodes"),
        ({"resources": {"nodes": 2, "ranks_per_node": 1, "cpus_per_rank": 64}}, "cpus_per_rank"),
    ],
    ids=["more nodes than there are", "more cores than a node has"],
)
def test_what_never_starts_is_reported(cluster_of: Cluster, changes: dict[str, object], words: str) -> None:
    """By the submission, or where Slurm takes it, by one look at its status."""
    file = cluster_of.write("never", **changes)
    done = cluster_of.ortflow("submit", "--backend", "slurm", "--fresh", file.name)
    if done.returncode:
        assert words in done.stderr
        return
    reported = Run(cluster_of, "never").status()
    cluster_of.ortflow("cancel", "never")
    assert words in reported["waits"], reported


def test_a_refusal_names_the_key_to_change(cluster_of: Cluster) -> None:
    file = cluster_of.write("refused", backends__slurm__partition="nope")
    done = cluster_of.ortflow("submit", "--backend", "slurm", file.name)
    assert done.returncode == 2
    assert "backends.slurm.partition" in done.stderr
    assert "invalid partition specified: nope" in done.stderr.lower()
    assert not cluster_of.project.run_dir("refused").exists(), "nothing half done is left"


@pytest.mark.chaos
def test_a_chain_of_three(cluster_of: Cluster) -> None:
    first = cluster_of.submit("chain-1", **SHORT, **slow(2.0))
    second = cluster_of.submit("chain-2", "--after", "chain-1", **SHORT)
    third = cluster_of.submit("chain-3", "--after", "chain-2,chain-1", **SHORT)
    assert "chain-2" in third.status()["waits"] or second.job in third.status()["waits"]
    for run in (first, second, third):
        run.finish()
    starts = [run.records("start")[0]["time"] for run in (first, second, third)]
    ends = [run.records("end")[-1]["time"] for run in (first, second, third)]
    assert ends[0] < starts[1]
    assert ends[1] < starts[2]


@pytest.mark.chaos
def test_a_chain_whose_first_fails(cluster_of: Cluster) -> None:
    first = cluster_of.submit("broken-1", **SHORT, **slow(1.0))
    second = cluster_of.submit("broken-2", "--after", "broken-1", **SHORT)
    cluster_of.ortflow("cancel", "broken-1", timeout=90)
    first.testbed.ended(first.job, 30)
    wait_until(lambda: second.testbed.state(second.job) in FINAL, 120)
    reported = second.status()
    assert reported["state"] == "cancelled"
    assert reported["cause"]


@pytest.mark.chaos
def test_logs_follow_across_a_restart(cluster_of: Cluster) -> None:
    run = cluster_of.submit("followed", **slow(PACE, attempts=1))
    run.until_step(5)
    follow = _start(cluster_of, "logs", "--follow", "followed")
    run.testbed.reported("scontrol", "requeue", run.job)
    run.finish()
    out, err = follow.communicate(timeout=120)
    assert follow.returncode == 0, err
    for attempt in (0, 1):
        for line in (run.run_dir / f"logs/attempt-{attempt:02d}/rank-0000.log").read_text().splitlines():
            assert line in out


@pytest.mark.chaos
def test_the_controller_is_away_while_a_run_is_followed(cluster_of: Cluster, undisturbed: Run) -> None:
    testbed = cluster_of.testbed
    file = cluster_of.write("watched", **slow(0.5))
    follow = _start(cluster_of, "submit", "--follow", "--backend", "slurm", file.name)
    run = Run(cluster_of, "watched")
    wait_until(lambda: bool(run.records("submit")), 120)
    run.until_step(5)
    testbed.controller("kill")
    start = time.monotonic()
    reported = run.status()
    assert time.monotonic() - start < ANSWERS
    assert reported["state"] == "running"
    assert "Unable to contact slurm controller" in reported["waits"]
    assert follow.poll() is None, follow.communicate()
    testbed.controller("start")
    run.finish()
    out, err = follow.communicate(timeout=120)
    assert follow.returncode == 0, f"{out}\n{err}"
    assert "finished at step 40" in out
    same_end(run, undisturbed)


def _start(cluster: Cluster, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*ORTFLOW, *arguments], cwd=cluster.project.folder, env=cluster.testbed.environment, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.parametrize("how", ["kill", pytest.param("freeze", marks=pytest.mark.chaos)])
def test_submit_to_a_controller_that_does_not_answer(cluster_of: Cluster, how: str) -> None:
    """One sentence, in time; and with --retry the run is there once, when it is back."""
    testbed = cluster_of.testbed
    name = f"no-answer-{how}"
    file = cluster_of.write(name, **LATER)
    testbed.controller(how)
    start = time.monotonic()
    done = cluster_of.ortflow("submit", "--backend", "slurm", file.name)
    took = time.monotonic() - start
    assert done.returncode == 1, done.stdout
    assert took < ANSWERS, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    # Hung, it may have taken the job: nobody is told to submit once more with force.
    assert ("--retry" if how == "kill" else "submitting again starts no second one") in done.stderr
    waiting = _start(cluster_of, "submit", "--backend", "slurm", "--retry", "60", file.name)
    time.sleep(2)
    testbed.controller("start" if how == "kill" else "thaw")
    out, err = waiting.communicate(timeout=120)
    assert waiting.returncode == 0, f"{out}\n{err}"
    assert testbed.reported("squeue", "-h", "-o", "%j").split().count(name) == 1


def test_many_runs_in_one_call(cluster_of: Cluster, undisturbed: Run, tmp_path: Path) -> None:
    """`ortflow list` of 200 runs, two of them in the queue: squeue is asked once, and nobody else."""
    folder = tmp_path / "runs"
    for number in range(198):
        copy = folder / f"old-{number}"
        shutil.copytree(undisturbed.run_dir, copy, ignore=shutil.ignore_patterns("checkpoints", "export", "logs"))
    for name in ("new-1", "new-2"):
        file = cluster_of.write(name, **LATER, run_dir=str(folder / name))
        assert cluster_of.ortflow("submit", "--backend", "slurm", file.name).returncode == 0
    counted = Counted.make(tmp_path)
    done = cluster_of.ortflow("list", "--json", "--runs-dir", str(folder), PATH=counted.path)
    assert done.returncode == 0, done.stderr
    states = [how["state"] for how in json.loads(done.stdout)]
    assert (states.count("finished"), states.count("pending")) == (198, 2)
    (call,) = counted.calls()
    assert call.startswith("squeue "), call


def test_a_job_of_another_member_of_the_group(cluster_of: Cluster, tmp_path: Path) -> None:
    """`squeue --me` does not show it: no second job is placed, and cancel ends it."""
    shim = tmp_path / "bin/sbatch"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nexec {shutil.which("sbatch")} --uid=nobody "$@"\n')
    shim.chmod(0o755)
    file = cluster_of.write("shared", backends__slurm__begin="now+1hour")
    path = f"{shim.parent}{os.pathsep}{os.environ['PATH']}"
    done = cluster_of.ortflow("submit", "-b", "slurm", file.name, PATH=path)
    assert done.returncode == 0, done.stderr
    run = Run(cluster_of, "shared")
    assert run.testbed.job(run.job)["UserId"].startswith("nobody")
    assert run.status()["state"] == "pending"
    assert '"pending"' in cluster_of.ortflow("list", "--json").stdout
    for words in (["resume", "shared"], ["submit", "-b", "slurm", file.name]):
        done = cluster_of.ortflow(*words)
        assert done.returncode == 2, done
        assert f"is job {run.job} in Slurm, pending" in done.stderr
    done = cluster_of.ortflow("cancel", "shared")
    assert done.returncode == 0, done.stderr
    assert run.testbed.state(run.job) == "CANCELLED"
    assert run.status()["state"] == "cancelled"


@pytest.mark.parametrize(
    "missing", [["scontrol"], ["scontrol", "squeue", "sbatch", "scancel"]], ids=["scontrol", "all"]
)
def test_nodes_without_commands_of_slurm(cluster_of: Cluster, undisturbed: Run, missing: list[str]) -> None:
    """A saved run goes on in another job; where nothing can submit one, it says so and is not "restarting"."""
    bare = cluster_of.project.folder / f"bare-{len(missing)}"
    bare.mkdir()
    for name in {"srun", "scontrol", "squeue", "sbatch", "scancel"} - {*missing}:
        (bare / name).symlink_to(str(shutil.which(name)))
    # /usr/bin has Slurm's commands here, so the rest of it is found by links.
    for command in Path("/usr/bin").iterdir():
        if command.name not in {"srun", "scontrol", "squeue", "sbatch", "scancel"}:
            (bare / command.name).symlink_to(command)
    name = f"bare-run-{len(missing)}"
    prologue = {"backends__slurm__prologue": [f"export PATH={bare}"]}
    run = cluster_of.submit(name, **both(slow(0.3, 1), prologue))
    first = run.job
    run.until_step(8)
    run.testbed.reported("scancel", "-s", "USR1", "-b", first)
    if len(missing) == 1:
        wait_until(lambda: run.job != first, STARTS, run.transcript)
        run.finish()
        same_end(run, undisturbed)
    else:
        reported = run.until_state("lost")
        assert "there is no squeue" in str(reported), reported
        assert "ortflow resume" in run.log()
    assert "there is no scontrol" in run.log() or "no commands of Slurm" in run.log()
    file = cluster_of.write(name, **prologue)
    report = cluster_of.ortflow("doctor", "-b", "slurm", "--job", file.name)
    assert report.returncode == (1 if len(missing) > 1 else 0), report.stdout
    assert mentions(report.stdout, "Slurm on the nodes: … scontrol")
