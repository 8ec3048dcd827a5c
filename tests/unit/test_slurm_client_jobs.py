"""Slurm's own output, as a real one (22.05) printed it, becomes jobs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ortflow.launchers.slurm.jobs import FORMAT, SEPARATOR, Job, read_sacct, read_scontrol, read_squeue

CAPTURED = Path(__file__).parent / "slurm_output"


def by_name(jobs: list[Job]) -> dict[str, Job]:
    return {job.name: job for job in jobs}


@pytest.fixture(scope="module")
def queue() -> dict[str, Job]:
    return by_name(read_squeue((CAPTURED / "squeue.txt").read_text()))


def test_a_running_job(queue: dict[str, Job]) -> None:
    job = queue["running"]
    assert job == Job(
        id="55270242", array=None, state="RUNNING", reason="", start=1795270808.0, end=1795271108.0, limit=300.0,
        nodes="node[2-3]", restarts=0, name="running", comment="ortflow aa|b=c Reason=Evil", submitted=1795270808.0,
    )  # fmt: skip
    assert job.active
    assert not job.waits


def test_waiting_jobs(queue: dict[str, Job]) -> None:
    assert {name: job.reason for name, job in queue.items() if job.waits} == {
        "never": "DependencyNeverSatisfied",
        "again": "BeginTime",
        "chained": "Dependency",
        "toobig": "PartitionNodeLimit",
        "wide": "Resources",
        "held": "JobHeldUser",
    }
    assert queue["again"].restarts == 1
    assert queue["chained"].dependency == "afterok:55270242(unfulfilled)"
    assert queue["toobig"].start is None
    assert queue["wide"].start == 1795271414.0
    assert queue["wide"].limit == (24 + 2) * 3600


def test_ended_jobs(queue: dict[str, Job]) -> None:
    ended = {name: (job.state, job.code, job.signal) for name, job in queue.items() if not job.active}
    assert ended == {
        "gone": ("CANCELLED", 0, 15),
        "done": ("COMPLETED", 0, 0),
        "bad": ("FAILED", 3, 0),
        "missing": ("FAILED", 127, 0),
        "nolog": ("FAILED", 0, 53),
    }


def test_tasks_of_an_array() -> None:
    tasks = [job for job in read_squeue((CAPTURED / "squeue.txt").read_text()) if job.name == "arr"]
    assert sorted((job.id, job.array, job.state) for job in tasks) == [
        ("55270248_0", "55270248", "RUNNING"),
        ("55270248_1", "55270248", "PENDING"),
        ("55270248_2", "55270248", "PENDING"),
    ]
    assert {job.number for job in tasks} == {55270248}


def test_lines_that_are_cut_short_are_passed_over() -> None:
    text = (CAPTURED / "squeue.txt").read_text()
    assert len(read_squeue(text[: len(text) // 2])) < len(read_squeue(text))
    assert read_squeue("") == []
    assert read_squeue("slurm_load_jobs error: Unable to contact slurm controller\n") == []


def test_squeue_is_asked_for_fields_whose_values_cannot_hold_the_separator() -> None:
    assert FORMAT.count(SEPARATOR) == FORMAT.count(",") + 1
    assert not SEPARATOR.isprintable()


def test_scontrol_gives_the_same(queue: dict[str, Job]) -> None:
    reported = by_name(read_scontrol((CAPTURED / "scontrol.txt").read_text()))
    # A comment is cut where it looks like a key; no key is taken from it.
    assert reported["running"] == replace(queue["running"], comment="ortflow aa|b=c")
    assert reported["nolog"] == queue["nolog"]
    assert (reported["arr"].id, reported["arr"].array, reported["arr"].state) == ("55270248_1", "55270248", "PENDING")


def test_sacct_output_is_read(queue: dict[str, Job]) -> None:
    reported = by_name(read_sacct((CAPTURED / "sacct.txt").read_text()))
    assert reported["gone"].state == "CANCELLED"
    assert reported["gone"].reason == "by 0"
    for name in ("done", "bad", "missing", "nolog"):
        assert reported[name] == replace(queue[name], reason="", comment="")
    assert reported["running"].end is None
    assert reported["again"].nodes == ""


@pytest.mark.parametrize(
    ("text", "seconds"), [("5:00", 300.0), ("1-02:00:00", 93600.0), ("10:00:00", 36000.0), ("UNLIMITED", None)]
)
def test_time_limits(queue: dict[str, Job], text: str, seconds: float | None) -> None:
    line = next(line for line in (CAPTURED / "squeue.txt").read_text().splitlines() if "\x1frunning\x1f" in line)
    assert read_squeue(line.replace("\x1f5:00\x1f", f"\x1f{text}\x1f"))[0].limit == seconds


def test_times_of_a_slurm_that_prints_the_hour() -> None:
    line = next(line for line in (CAPTURED / "squeue.txt").read_text().splitlines() if "\x1frunning\x1f" in line)
    job = read_squeue(line.replace("\x1f1795271108\x1f", "\x1f2026-11-21T14:25:08\x1f"))[0]
    assert job.end is not None
    assert abs(job.end - 1795271108.0) < 15 * 3600
