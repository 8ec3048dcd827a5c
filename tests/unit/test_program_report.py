"""The record of a program that resumes: what it logged behind the save is removed, whatever it calls its steps."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ortflow.launchers.kubernetes.log_replicator import rewind
from ortflow.workflow.run.events import EventLog
from ortflow.workflow.run.rundir import RunDir


def copied(run: RunDir) -> list[str]:
    return run.events(0).read_text().splitlines(True)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("saved", [0, 3])
def test_a_rewind_to_a_save(tmp_path: Path, first: int, saved: int) -> None:
    """Programs count the first step as 0 or as 1."""
    log = EventLog(tmp_path / "rank-0000.jsonl", 0, 0)
    for done in range(5):
        if done == 3:
            log.write("checkpoint_start", step=3)
            log.write("checkpoint", step=3, seconds=0.1, stall_seconds=0.1, bytes=1)
        log.write("step", step=done + first, loss=1.0)
    copy = RunDir(tmp_path / "copy")
    copy.events(0).parent.mkdir(parents=True)
    shutil.copy(log.path, copy.events(0))
    rewind(copy, saved, to_save=True)  # of a run in pods
    log.rewind(saved, to_save=True)
    assert [line for line in log.path.read_text().splitlines(True) if '"rewind"' not in line] == copied(copy)
    for done in range(saved, 5):
        log.write("step", step=done + first, loss=1.0)
    log.close()
    records = [json.loads(line) for line in (tmp_path / "rank-0000.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if record["event"] == "step"] == [first + done for done in range(5)]
    (undone,) = [record for record in records if record["event"] == "rewind"]
    assert (undone["to_step"], undone["from_step"]) == (saved, 4 + first)


def test_without_a_save_in_the_record_the_number_counts(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "rank-0000.jsonl", 0, 0)
    for step in range(1, 6):
        log.write("step", step=step, loss=1.0)
    log.rewind(3, to_save=True)
    log.close()
    records = [json.loads(line) for line in (tmp_path / "rank-0000.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if record["event"] == "step"] == [1, 2, 3]
