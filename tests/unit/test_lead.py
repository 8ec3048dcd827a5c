"""Ranks sleep until rank 0 is ready for MPI, and never longer than it lives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from run_files import spec_of
from waits import PATIENCE

from ortflow.workflow.ranks import Place
from ortflow.workflow.run import lead as lead_module
from ortflow.workflow.run.events import EventLog
from ortflow.workflow.run.lead import Lead, wait_for_lead
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.run.signals import StopFlag
from ortflow.workflow.steps import runtime
from ortflow.workflow.steps.context import Context

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there are no abstract sockets")


@pytest.fixture
def lead(tmp_path: Path) -> Iterator[Lead]:
    lead = Lead(tmp_path, 3)
    yield lead
    lead.ready()


def waiting(run_dir: Path, attempt: int = 3) -> threading.Thread:
    rank = threading.Thread(target=wait_for_lead, args=(run_dir, attempt), daemon=True)
    rank.start()
    return rank


def goes_on(rank: threading.Thread) -> bool:
    rank.join(PATIENCE)
    return not rank.is_alive()


def test_all_wait_until_rank_0_is_ready(lead: Lead, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    ranks = [waiting(path) for path in (tmp_path, tmp_path, tmp_path / "link")]
    spent = time.process_time()
    time.sleep(0.3)
    assert all(rank.is_alive() for rank in ranks)
    assert time.process_time() - spent < 0.1, "they sleep"
    lead.ready()
    assert all(goes_on(rank) for rank in ranks)
    assert goes_on(waiting(tmp_path)), "a late one does not wait"


def test_other_runs_and_attempts_do_not_wait(lead: Lead, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    assert goes_on(waiting(tmp_path, attempt=4))
    assert goes_on(waiting(tmp_path / "other"))
    assert goes_on(waiting(tmp_path / "missing"))


def test_a_child_of_rank_0_does_not_keep_them(lead: Lead, tmp_path: Path) -> None:
    rank = waiting(tmp_path)
    time.sleep(0.1)
    child = os.fork()
    if child == 0:
        signal.pause()
    try:
        lead.ready()
        assert goes_on(rank)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_they_go_on_when_rank_0_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from ortflow.workflow.run.lead import Lead;"
        "lead = Lead(Path(sys.argv[1]), 3); print('there', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        rank = waiting(tmp_path)
        time.sleep(0.2)
        assert rank.is_alive()
        process.kill()
        assert goes_on(rank)


def test_the_name_of_another_user_is_not_waited_for(
    lead: Lead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lead_module, "_owner", lambda _: os.geteuid() + 1)
    assert goes_on(waiting(tmp_path))


class ConnectedError(Exception):
    """In place of MPI."""


def test_ranks_connect_when_rank_0_has_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connected = []

    def connect(place: Place, _: object) -> None:
        connected.append(place.rank)
        raise ConnectedError

    def begin(rank: int, lead: Lead | None) -> None:
        events = EventLog(tmp_path / f"{rank}.jsonl", rank, 0)
        place = Place(rank, 2, rank, 2, "MPICH", "host")
        with pytest.raises(ConnectedError):
            runtime.runtime(Context(RunDir(tmp_path), spec_of(), place, 0, StopFlag(), events, lead=lead))
        events.close()

    monkeypatch.setattr(runtime, "connect", connect)
    lead = Lead(tmp_path, 0)
    other = threading.Thread(target=begin, args=(1, None), daemon=True)
    other.start()
    time.sleep(0.3)
    assert connected == []
    begin(0, lead)
    assert goes_on(other)
    assert sorted(connected) == [0, 1]
