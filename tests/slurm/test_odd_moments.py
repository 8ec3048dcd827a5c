"""Accidents at moments, and in places, that the tests of restarts do not come to."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from cluster import ENDS, Cluster, Run, rank_processes, same_end, slow
from project import of_kind
from testbed import wait_until

pytestmark = pytest.mark.chaos


def processes_of(job: str) -> list[psutil.Process]:
    """Everything that the job runs on its nodes, Slurm's own daemons left out."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("SLURM_JOB_ID") == job and not process.name().startswith("slurm"):
                found.append(process)
    return found


@pytest.mark.parametrize("pause", [0.0, 1.5, 4.0])
def test_sigterm_to_all_while_the_first_attempt_configures(cluster_of: Cluster, undisturbed: Run, pause: float) -> None:
    """Before there is anything to save: the run starts again by itself, and the input is not blamed.

    srun is one of the processes. If it is hit first it ends the step, which counts as a failure.
    """
    run = cluster_of.submit(f"early-{10 * pause:g}")
    wait_until(lambda: len(rank_processes(run.run_dir)) == 4, ENDS, run.transcript)
    time.sleep(pause)
    for process in processes_of(run.job):
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGTERM)
    run.finish()
    same_end(run, undisturbed)
    assert "user_error" not in run.outcomes(), run.transcript()
    assert run.status()["failures"] <= 1


def test_damaged_lines_between_two_attempts(cluster_of: Cluster, undisturbed: Run) -> None:
    run = cluster_of.submit("damaged", **slow(0.3))
    run.until_step(12)
    run.testbed.reported("scontrol", "requeue", run.job)
    wait_until(lambda: run.testbed.state(run.job) == "PENDING", 120)
    spoilt = [run.run_dir / "attempts.jsonl", *(run.run_dir / "events").glob("rank-000[01].jsonl")]
    assert len(spoilt) == 3
    for path in spoilt:
        first, rest = path.read_bytes().split(b"\n", 1)
        path.write_bytes(first + b'\n{"event":"st\0 garbage\n' + rest)
    reported = run.status()
    assert reported["state"] == "restarting"
    for path in spoilt[:1]:
        assert str(path) in reported["damaged"], reported
    assert "rank-0000.jsonl" in reported["damaged"], reported
    run.finish()
    for path in spoilt:
        assert b"garbage" in path.with_name(f"{path.name}.damaged").read_bytes()
        assert b"garbage" not in path.read_bytes()
    assert "damaged" in run.log(), run.log()
    same_end(run, undisturbed)
    assert not of_kind(run.run_dir, "rewind")


def test_a_heavy_load_ends_nothing(cluster_of: Cluster, undisturbed: Run) -> None:
    """Nodes that are slow are alive."""
    run = cluster_of.submit("loaded", **slow(0.5))
    run.until_step(3)
    busy = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(50)]
    try:
        time.sleep(20)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    run.finish()
    same_end(run, undisturbed)
    assert run.outcomes() == ["finished"]
    assert run.restarts == 0


def test_attempts_that_never_come_to_a_step_end(cluster_of: Cluster) -> None:
    """Something on the nodes signals each start of the job before its first step; `status` names the signal."""
    harm = '(for i in $(seq 60); do sleep 0.5; scancel -s USR2 -b "$SLURM_JOB_ID"; done) &'
    run = cluster_of.submit("fruitless", backends__slurm__prologue=[harm])
    wait_until(lambda: any(record["next"] == "stop" for record in run.records("end")), ENDS, run.transcript)
    assert len(run.records("end")) == 6, run.transcript()
    assert run.restarts == 5, "not queued once more in vain"
    wait_until(lambda: run.status()["state"] == "failed", 120, lambda: str(run.status()))
    shown = cluster_of.ortflow("status", "fruitless").stdout
    assert "a signal was sent by hand" in shown, shown
    assert "5 attempts" in shown, shown


def test_a_run_directory_that_is_moved(cluster_of: Cluster, undisturbed: Run) -> None:
    """Every verb works where it lies now, and the end is the same."""
    run = cluster_of.submit("moved", **slow(0.2))
    run.until_step(15)
    assert cluster_of.ortflow("cancel", "moved", timeout=ENDS).returncode == 0
    place = cluster_of.project.folder / "archive" / "of last week"
    place.parent.mkdir()
    copy = place.with_name("copied")
    shutil.copytree(run.run_dir, copy)
    run.run_dir.rename(place)
    for folder in (place, copy):
        for words in (
            ["status"], ["logs"], ["checkpoint", "verify"], ["checkpoint", "list"],
            ["export", "-o", str(folder.parent / "early.onnx")],
        ):  # fmt: skip
            done = cluster_of.ortflow(*words, str(folder))
            assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        (folder.parent / "early.onnx").unlink()
    for folder in (place, copy):
        there = At(cluster_of, folder.name, folder)
        done = cluster_of.ortflow("resume", str(folder))
        assert done.returncode == 0, done.stderr
        there.finish()
        same_end(there, undisturbed)
        assert "state       finished" in cluster_of.ortflow("status", str(folder)).stdout
    assert not run.run_dir.exists(), "nothing is made again where it was"


class At(Run):
    """A run that lies in another folder."""

    def __init__(self, cluster: Cluster, name: str, folder: Path) -> None:
        super().__init__(cluster, name)
        object.__setattr__(self, "_folder", folder)

    @property
    def run_dir(self) -> Path:
        return Path(self.__dict__["_folder"])
