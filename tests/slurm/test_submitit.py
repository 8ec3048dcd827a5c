"""Runs by submitit's executor, and their jobs by submitit's own class, on a real cluster without accounting."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import submitit
from cluster import STARTS, Cluster, Run, faults, slow
from submitit.core.utils import FailedJobError, UncompletedJobError
from testbed import wait_until

from ortflow.slurm import RunJob, SlurmExecutor
from ortflow.workflow.errors import Faults, UserError


@pytest.fixture
def here(cluster_of: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """This process as a user's Python on the login node, in the project's folder."""
    monkeypatch.chdir(cluster_of.project.folder)
    for name in os.environ:
        if name.startswith(("SLURM_", "SBATCH_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_CONF", cluster_of.testbed.environment["SLURM_CONF"])
    return cluster_of


def test_a_run_by_the_executor(here: Cluster, undisturbed: Run) -> None:
    executor = SlurmExecutor("runs")
    executor.update_parameters(
        name="by-hand", timeout_min=7, mem_gb=1, slurm_setup=["export FROM_SETUP=1"],
        slurm_additional_parameters={"spread-job": True, "thread_spec": 1},
    )  # fmt: skip
    file = here.write("executed", train__steps=40)
    job = executor.submit(file, "train.evaluation.every_steps=10")
    reported = here.testbed.job(job.job_id)
    assert (reported["JobName"], reported["TimeLimit"], reported["MinMemoryNode"]) == ("by-hand", "00:07:00", "1G")
    assert "#SBATCH --spread-job\n" in job.paths.submission_file.read_text()
    assert not job.done(), reported
    wait_until(lambda: job.state == "RUNNING", STARTS, lambda: job.state)
    result = job.result()
    run = Run(here, "executed")
    assert (result["state"], result["step"]) == ("finished", 40), result
    assert (run.run_dir / "export/model.onnx").read_bytes() == (undisturbed.run_dir / "export/model.onnx").read_bytes()
    assert "step 40" in str(job.stdout())
    assert job.stdout() == run.log()
    assert job.exception() is None
    assert run.status()["state"] == "finished"
    # submitit's own class reads it too, without accounting.
    plain = submitit.SlurmJob(run.run_dir / "slurm", job.job_id)
    assert plain.done()
    assert (plain.result(), plain.stdout()) == (result, job.stdout())


def test_a_job_that_fails_and_one_without_a_result(here: Cluster) -> None:
    executor = SlurmExecutor("runs")
    failing = faults(1, 3, "raise") | {"restart": {"failures": 0}}
    with executor.batch():
        failed = executor.submit(here.write("fails", **failing))
        gone = executor.submit(here.write("gone", backends__slurm__prologue=["exit 3"]))
    with pytest.raises(
        FailedJobError,
        match=r"fails in .*RuntimeError: this rank was told to raise.*budget of 0",
    ):
        failed.result()
    with pytest.raises(UncompletedJobError, match=r"gone in .*lost: .*exit code 3"):
        gone.result()


def test_a_job_in_a_folder_of_percents_is_cancelled(here: Cluster) -> None:
    executor = SlurmExecutor("runs-%j-%a")
    job = executor.submit(here.write("percents", **slow(0.3)))
    run_dir = Path("runs-%j-%a/percents").absolute()
    wait_until(lambda: "step 1" in (job.stdout() or ""), STARTS, lambda: f"{job.state} {job.stdout()}")
    job.cancel()
    assert job.done()
    assert "is cancelled" in str(job.exception())
    ends = ("COMPLETED", "CANCELLED", "COMPLETING", "FAILED")
    # The run's supervisor records the end before Slurm has ended the job.
    reread = RunJob(run_dir / "slurm", job.job_id)
    wait_until(lambda: reread.state in ends, STARTS, lambda: reread.state)


def test_what_a_run_has_of_its_own_is_refused(here: Cluster) -> None:
    """The message names the parameter, and comes before anything is submitted."""
    executor = SlurmExecutor("runs")
    with pytest.raises(Faults, match="slurm_comment"):
        executor.update_parameters(slurm_comment="mine")
    with pytest.raises(Faults, match="partitoin"):
        executor.update_parameters(slurm_partitoin="main")
    executor.update_parameters(slurm_additional_parameters={"output": "/dev/null"})
    with pytest.raises(Faults, match=r"additional_parameters\.output: is not allowed here; remove it"):
        executor.submit(here.write("refused"))
    assert not Path("runs/refused").exists()


def test_a_refusal_leaves_no_job_of_the_batch(here: Cluster) -> None:
    executor = SlurmExecutor("runs")
    file = here.write("batched", backends__slurm__begin="now+1hour")
    with pytest.raises(UserError, match=r"several runs .*runs/batched"):
        executor.map_array(file, ["seed=1", "seed=2"])
    with pytest.raises(Faults, match="sead"):
        executor.map_array(file, ["name=one"], ["sead=1"])
    with pytest.raises(UserError, match=r"backends\.slurm\.partition"):
        executor.map_array(file, ["name=two", "name=three"], ["seed=1", "backends.slurm.partition=nope"])
    assert here.testbed.reported("squeue", "-h", "-t", "pending,running", "-o", "%j") == ""


LEAVING = """
from ortflow.slurm import SlurmExecutor
kept, dropped = [SlurmExecutor("runs").submit("later.yaml", f"name={name}") for name in ("kept", "dropped")]
dropped.cancel_at_deletion()
kept.cancel_at_deletion().cancel_at_deletion(False)
print(kept.job_id, dropped.job_id)
"""


def test_a_job_is_cancelled_when_the_interpreter_exits(here: Cluster) -> None:
    here.write("later", backends__slurm__begin="now+1hour")
    done = subprocess.run([sys.executable, "-c", LEAVING], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    kept, dropped = done.stdout.split()
    assert here.testbed.state(dropped) == "CANCELLED"
    assert Run(here, "dropped").status()["state"] == "cancelled"
    assert here.testbed.state(kept) == "PENDING"
