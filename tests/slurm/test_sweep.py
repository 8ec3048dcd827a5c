"""A sweep on a real Slurm: one job array, each of whose tasks is a run of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cluster import Cluster, Counted, Run, slow
from project import evaluations, of_kind
from testbed import Testbed, wait_until

# faults/sitecustomize.py identifies ranks by PMI.
ONE = {"resources": {"cpus_per_rank": 1, "memory": "800Mi"}, "train__steps": 12, "backends__slurm__mpi": "pmi2"}
ENDS = 90.0


def table(cluster: Cluster, name: str) -> list[dict[str, Any]]:
    done = cluster.ortflow("list", "--sweep", name, "--json")
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)["runs"]
    return found


def states(cluster: Cluster, name: str) -> list[str]:
    return [row["state"] for row in table(cluster, name)]


def submit(cluster: Cluster, name: str, *arguments: str, **changes: Any) -> list[Run]:
    """Submit a sweep; its runs."""
    file = cluster.write(name, **{**ONE, **changes})
    done = cluster.ortflow("submit", "-b", "slurm", file.name, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((cluster.project.folder / "runs" / f"{name}.sweep" / "sweep.json").read_text())
    return [Run(cluster, run["run"]) for run in record["runs"]]


def queued(testbed: Testbed) -> list[str]:
    return testbed.reported("squeue", "-h", "--array", "-o", "%i").split()


def test_an_array_of_eight(cluster_of: Cluster) -> None:
    """One is cancelled while it waits, one while it runs, and one is requeued; all end."""
    sets = ["--set", "train.optimizer.lr=5e-3,5e-4", "--set", "seed=1..4"]
    # With four at a time the last one is certain to wait.
    runs = submit(cluster_of, "eight", *sets, "--at-once", "4", **slow(0.4))
    testbed, array = cluster_of.testbed, runs[0].job.partition("_")[0]
    assert [run.job for run in runs] == [f"{array}_{task}" for task in range(8)]
    assert runs[7].status()["state"] == "pending"
    done = cluster_of.ortflow("cancel", "eight-7")
    assert done.returncode == 0, done.stderr
    assert len(queued(testbed)) == 7, "the others are not cancelled with it"
    runs[0].until_step(2)
    testbed.reported("scontrol", "requeue", runs[0].job)
    runs[1].until_step(2)
    done = cluster_of.ortflow("cancel", "eight-1", timeout=90)
    assert done.returncode == 0, done.stderr
    assert states(cluster_of, "eight")[1] == states(cluster_of, "eight")[7] == "cancelled"
    for name in ("eight-1", "eight-7"):
        done = cluster_of.ortflow("resume", name)
        assert done.returncode == 0, done.stderr
    wait_until(lambda: states(cluster_of, "eight") == ["finished"] * 8, ENDS, lambda: str(table(cluster_of, "eight")))
    assert "_" not in runs[7].job, "alone now"
    assert runs[0].restarts == 1
    rows = table(cluster_of, "eight")
    assert [row["values"] for row in rows] == [
        {"train.optimizer.lr": rate, "seed": str(seed)} for rate in ("5e-3", "5e-4") for seed in range(1, 5)
    ]
    losses = [evaluations(run.run_dir)[-1][1] for run in runs]
    assert len(set(losses)) == 8, "each had its own values"
    assert [row["evaluation"]["loss"] for row in rows] == losses
    assert [row["best"] for row in rows] == [loss == min(losses) for loss in losses]
    shown = cluster_of.ortflow("list", "--sweep", "eight").stdout.splitlines()
    assert shown[0].split()[:4] == ["NAME", "train.optimizer.lr", "seed", "STATE"]
    assert [line.split()[1] for line in shown if line.startswith("*")] == [runs[losses.index(min(losses))].name]
    done = cluster_of.ortflow("submit", "-b", "slurm", "eight.yaml", *sets)
    assert "finished" in done.stdout, "there is nothing left to submit"
    assert queued(testbed) == []


def test_the_last_task_alone_is_ended(cluster_of: Cluster) -> None:
    """Slurm gives it the number of the whole array."""
    runs = submit(cluster_of, "last", "--set", "seed=1,2", **{**slow(0.3), "train__steps": 60})
    for run in runs:
        run.until_step(2)
    done = cluster_of.ortflow("cancel", "last-1", timeout=90)
    assert done.returncode == 0, done.stderr
    wait_until(lambda: queued(cluster_of.testbed) == [runs[0].job], 120, lambda: str(queued(cluster_of.testbed)))
    assert states(cluster_of, "last") == ["running", "cancelled"]
    done = cluster_of.ortflow("cancel", "--sweep", "last", timeout=90)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "last: 2 cancelled\n"
    assert of_kind(runs[0].run_dir, "preempted"), "it saved"


def test_a_task_that_may_not_be_queued_again_is_followed(cluster_of: Cluster) -> None:
    changes = {**slow(0.3), "backends__slurm__requeue": False, "train__steps": 14}
    runs = submit(cluster_of, "followed", "--set", "seed=1,2", **changes)
    cluster_of.testbed.grace(20)
    task = runs[1].job
    runs[1].until_step(3)
    urgent = cluster_of.testbed.preempt(task, seconds=2)
    wait_until(lambda: runs[1].job != task, 120, runs[1].transcript)
    assert "_" not in runs[1].job
    wait_until(lambda: states(cluster_of, "followed") == ["finished"] * 2, ENDS, runs[1].transcript)
    assert runs[1].records("start")[-1]["attempt"] == 1
    assert cluster_of.testbed.state(urgent) == "COMPLETED"


def test_cancel_of_what_waits(cluster_of: Cluster, tmp_path: Path) -> None:
    """20 runs with no more commands of Slurm's than one run would take."""
    runs = submit(cluster_of, "held", "--set", "seed=1..20", backends__slurm__begin="now+1hour")
    counted = Counted.make(tmp_path)
    done = cluster_of.ortflow("cancel", "--sweep", "held", PATH=counted.path)
    assert (done.returncode, done.stdout) == (0, "held: 20 cancelled\n"), done.stderr
    assert [call.split()[0] for call in counted.calls()].count("scancel") == 1, counted.calls()
    assert len(counted.calls()) < 5, counted.calls()
    assert queued(cluster_of.testbed) == []
    done = cluster_of.ortflow("submit", "-b", "slurm", "held.yaml", "--set", "seed=1..20")
    assert done.returncode == 0, done.stderr
    assert runs[19].job.endswith("_19")
    assert cluster_of.ortflow("cancel", "--sweep", "held").returncode == 0


def test_an_odd_folder(cluster_of: Cluster, tmp_path: Path) -> None:
    """Its name is part of a directive and of a command, followed by the task's number."""
    folder = tmp_path / "it's 100% $HOME %j %t %a %A"
    file = cluster_of.write("odd", **ONE, run_dir=str(folder / "odd"))
    done = cluster_of.ortflow("submit", "-b", "slurm", file.name, "--set", "seed=1,2")
    assert done.returncode == 0, done.stderr
    name = str(folder / "odd")
    wait_until(lambda: states(cluster_of, name) == ["finished"] * 2, ENDS, lambda: str(table(cluster_of, name)))
    job = table(cluster_of, name)[1]["job"]
    assert (folder / f"odd-1/logs/slurm-{job}.log").exists()


def test_an_odd_folder_of_one_run(cluster_of: Cluster, tmp_path: Path) -> None:
    """A part of the name looks like Slurm's and submitit's pattern for the job's number."""
    folder = tmp_path / "%j %t 100%"
    file = cluster_of.write("odd-one", **ONE, run_dir=str(folder / "odd-one"))
    done = cluster_of.ortflow("submit", "-b", "slurm", "--follow", file.name)
    assert done.returncode == 0, done.stderr
    assert (folder / "odd-one/export/model.onnx").exists()
    (log,) = (folder / "odd-one/logs").glob("slurm-*.log")
    job = log.stem.partition("-")[2]
    assert (folder / f"odd-one/slurm/{job}_submission.sh").read_text().startswith("#!")
