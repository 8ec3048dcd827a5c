"""Two jobs of one script that begin together, where no lock keeps them apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ortflow.launchers.batch.claim import rival
from ortflow.launchers.batch.history import by_hand
from ortflow.launchers.slurm.current_job import SlurmJob
from ortflow.launchers.slurm.jobs import Job
from ortflow.workflow.run.rundir import RunDir

RUN = RunDir(Path("/runs/a"))
OURS = f"ortflow {by_hand(RUN.root).submission}"
ON_RECORD = [{"event": "submit", "launcher": "slurm", "job": "4"}]


def job(number: str, state: str = "RUNNING", comment: str = OURS) -> Job:
    return Job(number, number.partition("_")[0] if "_" in number else None, state, comment=comment)


@pytest.mark.parametrize(
    ("mine", "jobs", "records", "found"),
    [
        ("5", [job("5"), job("4")], [], "4"),
        ("4", [job("5"), job("4")], [], None),
        ("5", [job("5"), job("4", "PENDING")], [], None),
        ("5", [job("5"), job("4", "COMPLETED")], [], None),
        ("5", [job("5"), job("4", comment="ortflow other")], [], None),
        ("5", [job("5"), job("4")], ON_RECORD, None),
        ("5", [job("4")], [], None),
        ("5_1", [job("5_1"), job("4_0"), job("5_0")], [], None),
        ("5_1", [job("5_1"), job("4_1")], [], "4_1"),
    ],
    ids=[
        "the older one has it", "we are the older", "it waits", "it is over", "another run's", "it is on record",
        "ours is not seen", "other tasks of arrays", "the same task",
    ],
)  # fmt: skip
def test_who_has_the_run(mine: str, jobs: list[Job], records: list[dict[str, Any]], found: str | None) -> None:
    reported = rival(RUN, SlurmJob(mine, 0, "n1"), jobs, records)
    assert (reported.id if reported else None) == found
