"""Runs that wait in the queue, in places and for people that are not as usual; nothing is trained here."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cluster import Cluster, Run
from project import Project

LATER = {"backends__slurm__begin": "now+1hour"}


@pytest.fixture
def elsewhere(cluster_of: Cluster) -> Iterator[Cluster]:
    """The same project in a folder whose name holds what Slurm has patterns for."""
    folder = cluster_of.project.folder / "else %j"
    folder.mkdir()
    shutil.copy(cluster_of.project.folder / "model.onnx", folder)
    shutil.copytree(cluster_of.project.folder / "set", folder / "set")
    yield replace(cluster_of, project=Project(folder))
    shutil.rmtree(folder)


def listed(cluster: Cluster, name: str) -> tuple[str, str]:
    """State and job in `ortflow list`."""
    done = cluster.ortflow("list", "--json")
    assert done.returncode == 0, done.stderr
    (how,) = [how for how in json.loads(done.stdout) if how["name"] == name]
    return how["state"], how["job"]


@pytest.mark.chaos
def test_the_same_name_from_two_folders(cluster_of: Cluster, elsewhere: Cluster) -> None:
    """Each sees its own job, and cancels no other."""
    here, there = cluster_of.submit("twin", **LATER), elsewhere.submit("twin", **LATER)
    assert here.job != there.job
    for run in (here, there):
        reported = run.status()
        assert (reported["state"], reported["job"], reported["directory"]) == ("pending", run.job, str(run.run_dir))
        assert listed(run.cluster, "twin") == ("pending", run.job)
    done = here.cluster.ortflow("cancel", "twin")
    assert done.returncode == 0, done.stderr
    assert (here.status()["state"], there.status()["state"]) == ("cancelled", "pending")
    assert here.testbed.reported("squeue", "-h", "-o", "%A").split() == [there.job]


@pytest.mark.chaos
def test_a_copy_of_a_run_that_waits(cluster_of: Cluster) -> None:
    """Its job is that of the directory it was submitted from; whoever resumes the copy gets another."""
    run = cluster_of.submit("copied-from", **LATER)
    copy = Run(cluster_of, "copied-to")
    shutil.copytree(run.run_dir, copy.run_dir)
    reported = copy.status()
    assert (reported["state"], reported["job"]) == ("lost", None)
    assert f"a copy of {run.run_dir}, and job {run.job} belongs to that" in reported["cause"]
    assert cluster_of.ortflow("cancel", "copied-to").returncode == 0
    assert run.status()["state"] == "pending"
    done = cluster_of.ortflow("resume", "copied-to")
    assert done.returncode == 0, done.stderr
    reported = copy.status()
    assert (reported["state"], reported["job"]) == ("pending", copy.job)
    assert copy.job != run.job
    assert cluster_of.ortflow("cancel", "copied-to").returncode == 0
    assert (run.status()["state"], copy.status()["state"]) == ("pending", "cancelled")
    assert cluster_of.testbed.reported("squeue", "-h", "-o", "%A").split() == [run.job]


@pytest.mark.parametrize("ahead", [pytest.param(300.0, marks=pytest.mark.chaos), -300.0])
def test_a_client_with_a_wrong_clock(cluster_of: Cluster, ahead: float) -> None:
    """The login node's clock is minutes off: nothing that is said or done depends on it."""
    client = replace(cluster_of, ahead=ahead)
    run = client.submit("wrong-clock", **LATER)
    reported = run.status()
    assert (reported["state"], reported["job"]) == ("pending", run.job)
    assert listed(client, "wrong-clock") == ("pending", run.job)
    assert client.ortflow("cancel", "wrong-clock").returncode == 0
    assert run.status()["state"] == "cancelled"
    first = run.job
    done = client.ortflow("resume", "wrong-clock")
    assert done.returncode == 0, done.stderr
    assert run.job != first
    assert run.status()["state"] == "pending"
    again = client.ortflow("submit", "-b", "slurm", "wrong-clock.yaml")
    assert again.returncode == 2
    assert f"is job {run.job} in Slurm" in again.stderr


def test_other_nodes_are_reported_when_a_run_continues(cluster_of: Cluster, undisturbed: Run) -> None:
    """Here a copy of one that has finished, where the copy lies."""
    copy = Run(cluster_of, "fewer-nodes")
    shutil.copytree(undisturbed.run_dir, copy.run_dir)
    assert copy.status()["directory"] == str(copy.run_dir)
    changes = ("resources.nodes=1", "train.steps=60", "backends.slurm.begin=now+1hour")
    done = cluster_of.ortflow("resume", "fewer-nodes", *changes)
    assert done.returncode == 0, done.stderr
    assert "resources.nodes: 2 before, 1 now" in done.stdout
    assert copy.job != undisturbed.job
    assert copy.status()["state"] == "pending"
    assert undisturbed.status()["state"] == "finished"
    assert str(Path("runs/fewer-nodes")) in cluster_of.testbed.reported("scontrol", "show", "job", copy.job)
