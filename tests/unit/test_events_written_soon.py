"""Events of steps that are written together: soon, in order, before any other, and whatever happens to the rank."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from ortflow.workflow.run import events as module
from ortflow.workflow.run.events import PERIOD, EventLog
from ortflow.workflow.run.record import EVENTS, read_records


def steps_in(path: Path) -> list[int]:
    return [record["step"] for record in read_records(path, EVENTS)[0] if record["event"] == "step"]


def test_steps_are_written_within_a_second_though_nothing_follows(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "e.jsonl", 0, 0)
    before = time.time()
    for step in range(3):
        log.write_soon("step", {"step": step, "loss": float("nan")}, dict)
    after = time.time()
    until = time.monotonic() + 30
    while steps_in(log.path) != [0, 1, 2] and time.monotonic() < until:
        time.sleep(0.01)
    records = read_records(log.path, EVENTS)[0]
    assert [record["step"] for record in records] == [0, 1, 2]
    assert all(record["loss"] is None for record in records)
    micro = 1e-6  # an event's time is written in microseconds, rounded
    assert all(before - micro <= record["time"] <= after + micro for record in records)
    assert PERIOD < 1
    log.close()


def test_no_event_stands_before_an_earlier_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PERIOD", 3600.0)
    log = EventLog(tmp_path / "e.jsonl", 0, 0)
    log.write_soon("step", {"step": 1}, dict)
    log.write_soon("step", {"step": 2}, dict)
    assert steps_in(log.path) == []
    log.write("checkpoint_start", step=2)
    log.write_soon("step", {"step": 3}, dict)
    assert [(record["event"], record["step"]) for record in read_records(log.path, EVENTS)[0]] == [
        ("step", 1), ("step", 2), ("checkpoint_start", 2),
    ]  # fmt: skip
    assert log.flush()
    assert steps_in(log.path) == [1, 2, 3]
    log.write_soon("step", {"step": 4}, dict)
    log.close()
    assert steps_in(log.path) == [1, 2, 3, 4]


def test_without_a_thread_each_step_is_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(module.threading.Thread, "start", start)
    log = EventLog(tmp_path / "e.jsonl", 0, 0)
    for step in (1, 2):
        log.write_soon("step", {"step": step}, dict)
        assert steps_in(log.path) == [*range(1, step + 1)]
    log.close()


def test_what_the_thread_could_not_write_fails_the_next_step(tmp_path: Path) -> None:
    """A limit of the file's size, which the rank reports with the file's name."""
    program = (
        "import resource, signal, sys, time; from pathlib import Path\n"
        "from ortflow.workflow.run.events import EventLog\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "log = EventLog(Path(sys.argv[1]), 0, 0)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))\n"
        "for step in range(600):\n"
        "    try: log.write_soon('step', {'step': step}, dict)\n"
        "    except OSError as error: print(error.filename); break\n"
        "    time.sleep(0.1)\n"
    )
    path = tmp_path / "e.jsonl"
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(path)
