"""`ortflow doctor --backend slurm --job`: faults of a real cluster are reported, and nothing is left on it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster
from messages import mentions, says
from project import ORTFLOW
from testbed import Testbed, wait_until


@dataclass(frozen=True)
class Report:
    """The doctor's report."""

    code: int
    found: list[dict[str, Any]]
    stderr: str

    def one(self, about: str) -> dict[str, Any]:
        """The only line about a subject."""
        (found,) = [line for line in self.found if line["about"] == about]
        return found

    def bad(self) -> list[str]:
        """Subjects with a fault."""
        return [line["about"] for line in self.found if line["level"] == "fault"]


def examine(cluster: Cluster, file: Path | None, *arguments: str) -> Report:
    words = [*([file.name] if file else []), *arguments]
    done = cluster.ortflow("doctor", "--backend", "slurm", "--json", *words, timeout=90)
    assert done.stdout, done.stderr
    return Report(done.returncode, json.loads(done.stdout)["findings"], done.stderr)


@pytest.fixture
def doctored(cluster_of: Cluster) -> Iterator[Cluster]:
    """A cluster on which nothing is left behind."""
    yield cluster_of
    assert not list(cluster_of.project.folder.glob("**/.ortflow-doctor-*"))
    assert "ortflow-doctor" not in cluster_of.testbed.reported("squeue", "-h", "-o", "%j")


def test_a_cluster_on_which_the_run_works(doctored: Cluster) -> None:
    file = doctored.write("sound")
    report = examine(doctored, file, "--job")
    assert (report.code, report.bad()) == (0, []), report
    assert mentions(report.one("MPI")["what"], "4 ranks … 2 nodes … --mpi=pmi2")
    assert "each reads what the others wrote" in report.one("shared folder")["what"]
    assert report.one("clocks")["level"] == report.one("locks")["level"] == "ok"
    speeds = report.one("disk")["data"]["bytes_per_second"]
    assert len(speeds) == 2
    assert min(speeds.values()) > 1e6
    assert report.one("request")["what"].startswith("2 nodes with 2 cores, ")
    assert report.one("request")["what"].endswith(" each: fits in main")
    assert report.one("sbatch")["what"].startswith("takes the job to start at")
    assert report.one("NCCL")["level"] == "untested"
    loads = report.one("srun --mpi")["what"]
    assert "pmi2" in loads.partition(";")[0]
    assert not doctored.project.run_dir("sound").exists()


def test_what_two_nodes_lack(doctored: Cluster) -> None:
    """The batch step's node does not see the runs, the other node not the interpreter: one job reports both."""
    first, second = doctored.testbed.nodes[:2]
    runs = doctored.project.folder / "runs"
    runs.mkdir(exist_ok=True)
    file = doctored.write("lacking", backends__slurm__nodelist=f"{first},{second}")
    with doctored.testbed.lacking(first, runs), doctored.testbed.lacking(second, Path(sys.prefix)):
        report = examine(doctored, file, "--job")
    assert (report.code, report.bad()) == (1, ["shared folder", "interpreter on the nodes"])
    assert report.one("shared folder")["what"].startswith(f"{first} does not see {runs}")
    assert report.one("interpreter on the nodes")["what"] == f"{second} cannot run it: {sys.executable}: not found"
    assert report.one("MPI")["level"] == "untested"


def test_inputs_and_a_start_that_does_not_fit(doctored: Cluster) -> None:
    """A node without the data, and MPICH with pmix."""
    first, second = doctored.testbed.nodes[:2]
    data = doctored.project.folder / "set"
    changes = {"backends__slurm__nodelist": f"{first},{second}", "backends__slurm__mpi": "pmix"}
    with doctored.testbed.lacking(second, data):
        report = examine(doctored, doctored.write("pmix", **changes), "--job")
    assert (report.code, report.bad()) == (1, ["input", "input", "MPI"])
    inputs = [line["what"] for line in report.found if line["about"] == "input"]
    assert inputs == [f"{second} does not see {data / name}.arrow" for name in ("train", "eval")]
    assert "0 of 4 ranks connected with --mpi=pmix" in report.one("MPI")["what"]
    assert "set backends.slurm.mpi to auto, pmi2 or mpirun" in report.one("MPI")["fix"]
    assert report.one("backends.slurm.mpi pmix")["level"] == "warning"


def test_ranks_that_are_each_alone(doctored: Cluster) -> None:
    """A site whose srun ignores --mpi: nothing fails, and every rank has a world of size 1."""
    wrapper = doctored.project.folder / "site/srun"
    wrapper.parent.mkdir()
    wrapper.write_text('#!/bin/bash\nexec /usr/bin/srun "${@/--mpi=pmi2/--mpi=none}"\n')
    wrapper.chmod(0o755)
    prologue = [f"export PATH={wrapper.parent}:$PATH"]
    report = examine(doctored, doctored.write("alone", backends__slurm__prologue=prologue), "--job")
    assert (report.code, report.bad()) == (1, ["MPI"])
    assert mentions(report.one("MPI")["what"], "each of 4 ranks", "world of 1", "--mpi=pmi2")


def test_a_job_that_would_never_start(doctored: Cluster) -> None:
    report = examine(doctored, doctored.write("too-much", resources__nodes=9), "--job")
    assert (report.code, report.bad()) == (1, ["request", "job"])
    assert mentions(report.one("request")["what"], "partition main", "4 nodes", "9")
    assert "would never start" in report.one("job")["what"]


def test_a_busy_cluster(doctored: Cluster) -> None:
    """A pending job: the reason is reported and the job cancelled, also when the doctor is interrupted."""
    testbed = doctored.testbed
    everything = ["--partition=urgent", "--exclusive", f"--nodes={len(testbed.nodes)}"]
    other = testbed.sbatch(*everything, "--time=5", "--output=/dev/null", "--wrap=sleep 99")
    wait_until(lambda: testbed.state(other) == "RUNNING", 120)
    report = examine(doctored, None, "--job", "--nodes", "2", "--wait", "3")
    assert (report.code, report.bad()) == (0, [])
    assert "was still pending after 3 s" in report.one("job")["what"]
    assert "--wait" in report.one("job")["fix"]
    assert report.one("nodes")["level"] == "untested"
    assert testbed.reported("squeue", "-h", "-n", "ortflow-doctor") == ""
    process = subprocess.Popen(
        [*ORTFLOW, "doctor", "--backend", "slurm", "--job"],
        cwd=doctored.project.folder, env=testbed.environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    wait_until(lambda: "PENDING" in testbed.reported("squeue", "-h", "-n", "ortflow-doctor", "-o", "%T"), 120)
    process.send_signal(signal.SIGTERM)
    _, words = process.communicate(timeout=120)
    assert process.returncode == 1
    assert says(words.splitlines()[-1], "error: … SIGTERM … job was cancelled")
    assert testbed.reported("squeue", "-h", "-n", "ortflow-doctor") == ""


def test_a_controller_that_is_away(doctored: Cluster) -> None:
    testbed: Testbed = doctored.testbed
    testbed.controller("stop")
    begun = time.monotonic()
    report = examine(doctored, None, "--job")
    testbed.controller("start")
    assert time.monotonic() - begun < 60, "it does not wait for ever"
    assert (report.code, report.bad()) == (1, ["controller"])
    assert "the Slurm controller does not answer" in report.one("controller")["what"]
    assert report.one("interpreter")["level"] == "ok"
