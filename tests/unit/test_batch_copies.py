"""Run directories that were copied or moved while their run was under way."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from messages import mentions

from ortflow.launchers.batch.status import status
from ortflow.launchers.copies import original
from ortflow.launchers.placed import placed
from ortflow.launchers.records import State
from ortflow.launchers.slurm.commands import Slurm
from ortflow.launchers.slurm.jobs import Job
from ortflow.workflow.run.rundir import RunDir

QUEUED = Job("7", None, "PENDING", comment="ortflow s1")


def submitted(root: Path) -> RunDir:
    root.mkdir(parents=True)
    run = RunDir(root)
    run.run_file.write_text(f"name: here\nrun_dir: '{root}'\n" if "'" not in str(root) else f'run_dir: "{root}"\n')
    run.record_attempt(event="submitting", launcher="slurm", submission="s1")
    run.record_attempt(event="submit", launcher="slurm", submission="s1", job="7")
    return run


def copied(run: RunDir, root: Path) -> RunDir:
    shutil.copytree(run.root, root)
    return RunDir(root)


@pytest.mark.parametrize("name", ["here", "it's", "a b: c"])
def test_a_copy_names_the_directory_it_comes_from(tmp_path: Path, name: str) -> None:
    run = submitted(tmp_path / name)
    copy = copied(run, tmp_path / "copy")
    assert original(copy, copy.read_attempts(), "slurm") == run.root
    assert original(run, run.read_attempts(), "slurm") is None


def test_status_leaves_the_job_to_the_original(tmp_path: Path) -> None:
    run = submitted(tmp_path / "here")
    copy = copied(run, tmp_path / "copy")
    reported = status(copy, Slurm(), [QUEUED], lambda _: QUEUED)
    assert (reported.state, reported.job) == (State.LOST, None)
    assert reported.cause is not None
    assert mentions(reported.cause, f"copy of {run.root} … job 7")
    reported = status(run, Slurm(), [QUEUED], lambda _: QUEUED)
    assert (reported.state, reported.job) == (State.PENDING, "7")


def test_a_run_that_was_moved_keeps_its_job(tmp_path: Path) -> None:
    run = submitted(tmp_path / "here")
    moved = RunDir(run.root.rename(tmp_path / "there"))
    assert original(moved, moved.read_attempts(), "slurm") is None
    assert status(moved, Slurm(), [QUEUED], lambda _: QUEUED).job == "7"


def test_a_directory_with_two_names_is_not_a_copy(tmp_path: Path) -> None:
    run = submitted(tmp_path / "here")
    (tmp_path / "link").symlink_to(run.root)
    link = RunDir(tmp_path / "link")
    assert original(link, link.read_attempts(), "slurm") is None


def test_another_run_in_the_old_place_does_not_count(tmp_path: Path) -> None:
    run = submitted(tmp_path / "here")
    moved = RunDir(run.root.rename(tmp_path / "there"))
    (other := RunDir(run.root)).root.mkdir()
    other.run_file.write_text(f"run_dir: {other.root}\n")
    other.record_attempt(event="submit", launcher="slurm", submission="s2", job="8")
    assert original(moved, moved.read_attempts(), "slurm") is None


def test_jobs_from_before_the_copy_are_none_of_its_own(tmp_path: Path) -> None:
    copy = copied(submitted(tmp_path / "here"), tmp_path / "copy")
    copy.record_attempt(event="copied", of=str(tmp_path / "here"))
    assert placed(copy.read_attempts(), "slurm") == []
    copy.record_attempt(event="submit", launcher="slurm", submission="s3", job="9")
    assert [one.job for one in placed(copy.read_attempts(), "slurm")] == ["9"]
