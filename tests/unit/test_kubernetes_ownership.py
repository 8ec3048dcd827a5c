"""Whose a run directory is on Kubernetes, whatever the clocks of its pods and of its volume say."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ortflow.launchers.kubernetes import ownership
from ortflow.launchers.kubernetes.ownership import Ownership, owner_of
from ortflow.launchers.kubernetes.pod import Pod
from ortflow.launchers.locks import hold
from ortflow.workflow.errors import UserError
from ortflow.workflow.rundir import RunDir

HOURS = 7200.0
CLOCKS = [-HOURS, HOURS]
"""Seconds that the clock of the volume is ahead of ours."""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run directory; another keeper counts as dead after a second."""
    monkeypatch.setattr(ownership, "ALIVE", 1.0)
    monkeypatch.setattr(ownership, "BEAT", 0.2)
    monkeypatch.setattr(ownership, "LOOK", 0.05)
    monkeypatch.setattr(ownership, "OLD_KEEPER", 5.0)
    return RunDir(tmp_path)


def pod(run: RunDir, submission: str) -> Pod:
    return Pod(f"gpt-{submission}", submission, run.run_file, run.root, 2222, new_budget=False, fresh=False)


@contextmanager
def another(run: RunDir, ahead: float, beats_for: float = 100.0) -> Iterator[None]:
    """A keeper of another submission, which holds the directory until it is fenced off."""
    Ownership(run, pod(run, "one")).renew()
    owner, over, descriptor = owner_of(run), threading.Event(), hold(run.lock)

    def live() -> None:
        begun = time.monotonic()
        path = run.root / ".keeper"
        while owner_of(run) == owner and not over.is_set():
            if time.monotonic() < begun + beats_for:
                path.touch()
                moment = time.time() + ahead
                os.utime(path, (moment, moment))
            time.sleep(0.1)
        os.close(descriptor)

    thread = threading.Thread(target=live)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("ahead", CLOCKS)
def test_nobody_takes_a_run_whose_keeper_shows_signs(run: RunDir, ahead: float) -> None:
    said: list[str] = []
    with another(run, ahead):
        before = owner_of(run)
        with pytest.raises(UserError, match="is in use by the MPIJob gpt-one"):
            Ownership(run, pod(run, "two")).settle_with_others(0.5, said.append)
        assert owner_of(run) == before
    assert said == ["the run directory is in use by gpt-one: checking whether it is alive"]


@pytest.mark.parametrize("ahead", CLOCKS)
def test_a_keeper_without_signs_is_fenced_off(run: RunDir, ahead: float) -> None:
    """It held the lock, as on a file server that has lost sight of its node."""
    with another(run, ahead, beats_for=0.5):
        Ownership(run, pod(run, "two")).settle_with_others(30.0, lambda text: None)
    assert json.loads(run.owner.read_text())["job"] == "gpt-two"


def test_time_in_which_the_volume_does_not_answer_does_not_count(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file server that hangs keeps the other one from its signs as it keeps us from seeing them."""
    whole = ownership.wait_free
    hangs = iter([1.5])

    def slow(path: Path, seconds: float) -> bool:
        time.sleep(next(hangs, 0.0))
        return whole(path, seconds)

    monkeypatch.setattr(ownership, "wait_free", slow)
    with another(run, 0.0, beats_for=0.0):
        threading.Timer(1.8, lambda: _beat_on(run)).start()
        with pytest.raises(UserError, match="is in use"):
            Ownership(run, pod(run, "two")).settle_with_others(0.5, lambda text: None)


def _beat_on(run: RunDir) -> None:
    for _ in range(8):
        (run.root / ".keeper").touch()
        time.sleep(0.2)


def test_signs_go_on_while_nothing_else_does(run: RunDir) -> None:
    """As while `prepare` runs."""
    ours = Ownership(run, pod(run, "one"))
    ours.renew()
    ours.watch()
    seen = set()
    for _ in range(10):
        time.sleep(0.1)
        seen.add((run.root / ".keeper").stat().st_mtime_ns)
    assert len(seen) >= 3
