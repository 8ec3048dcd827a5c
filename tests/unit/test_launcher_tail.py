"""Following files that other processes write, truncate and replace."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest

from ortflow.launchers.attempts.tail import EventTail, LineTail, last_lines, last_records
from ortflow.launchers.logs import log_lines
from ortflow.workflow.errors import UserError
from ortflow.workflow.run.events import EventLog
from ortflow.workflow.run.rundir import RunDir


def test_lines_come_whole_and_once(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = LineTail(path)
    assert tail.read() == []
    with path.open("ab", buffering=0) as file:
        file.write(b"one\ntw")
        assert tail.read() == [b"one"]
        file.write(b"o\nthree")
        assert tail.read() == [b"two"]
    assert tail.rest() == b"three"
    assert tail.read() == []
    tail.close()


def test_events_that_a_rewind_rewrites_are_not_reported_again(tmp_path: Path) -> None:
    path = tmp_path / "rank-0000.jsonl"
    EventLog(path, 0, 0).write("step", step=0)
    tail = EventTail(path)
    log = EventLog(path, 0, 1)
    for step in range(1, 6):
        log.write("step", step=step)
    assert [record["step"] for record in tail.read()] == [1, 2, 3, 4, 5]
    log.rewind(3)
    log.write("step", step=4)
    found = tail.read()
    assert [(record["event"], record.get("step")) for record in found] == [("rewind", None), ("step", 4)]
    assert tail.read() == []
    tail.close()
    log.close()


def test_last_records_of_a_long_file(tmp_path: Path) -> None:
    path = tmp_path / "events"
    path.write_text("".join(json.dumps({"event": "step", "step": step}) + "\n" for step in range(1000)) + '{"step": 10')
    found = last_records(path, 200)
    assert found[-1] == {"event": "step", "step": 999}
    assert 3 < len(found) < 20
    assert last_records(tmp_path / "none") == []
    assert last_lines(path, 2) == ['{"event": "step", "step": 999}', '{"step": 10']


def test_logs_continue_with_the_next_attempt(tmp_path: Path) -> None:
    run, over = RunDir(tmp_path), threading.Event()

    def write(attempt: int, text: str) -> None:
        path = run.log(attempt, 0)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(text)

    write(0, "a\n")

    def later() -> None:
        time.sleep(0.3)
        write(0, "b\n")
        write(1, "c\nd")
        over.set()

    thread = threading.Thread(target=later)
    thread.start()
    assert list(log_lines(run, attempt=None, rank=0, active=lambda: not over.is_set())) == ["a", "b", "c", "d"]
    thread.join()
    assert list(log_lines(run, attempt=0, rank=0, active=lambda: False)) == ["a", "b"]
    with pytest.raises(UserError, match=r"rank 7.*attempt 1.*rank-0000"):
        list(log_lines(run, attempt=None, rank=7, active=lambda: False))


def test_a_tail_of_what_does_not_exist_costs_little(tmp_path: Path) -> None:
    tail = LineTail(tmp_path / "none", from_end=True)
    start = os.times().user
    for _ in range(1000):
        tail.read()
    assert os.times().user - start < 0.5
