"""Ownership of a run directory on Kubernetes, independent of the clocks of its pods and of its volume."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from fake_clock import FakeClock
from waits import wait_until

from ortflow.launchers.attempts.locks import hold, wait_free
from ortflow.launchers.kubernetes import ownership
from ortflow.launchers.kubernetes.ownership import ALIVE, BEAT, OLD_SUPERVISOR, POLL, Ownership, owner_of
from ortflow.launchers.kubernetes.pod import Pod
from ortflow.workflow.errors import OrtflowError, UserError
from ortflow.workflow.run import fence
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.system.clock import Clock

HOURS = 7200.0
CLOCKS = [-HOURS, HOURS]
"""Seconds that the clock of the volume is ahead of ours."""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def pod(run: RunDir, submission: str) -> Pod:
    return Pod(f"gpt-{submission}", submission, run.run_file, run.root, 2222, new_budget=False, fresh=False)


class Another:
    """A supervisor process of another submission, which holds the directory until it is fenced off."""

    def __init__(self, run: RunDir, clock: FakeClock, ahead: float = 0.0, signs: Sequence[float] = ()) -> None:
        Ownership(run, pod(run, "one")).renew()
        self._run, self._clock, self._ahead = run, clock, ahead
        self._owner, self._lock = owner_of(run), hold(run.lock)
        for seconds in signs:
            clock.after(seconds, self._touch)
        self._look()

    def _touch(self) -> None:
        path, moment = self._run.root / ".run_supervisor", self._clock.time() + self._ahead
        path.touch()
        os.utime(path, (moment, moment))

    def _look(self) -> None:
        """As the thread that watches the fence does."""
        if owner_of(self._run) != self._owner:
            os.close(self._lock)
        else:
            self._clock.after(fence.PERIOD, self._look)


def beats(first: float, last: float) -> list[float]:
    """The times of heartbeats in an interval."""
    return [first + number * BEAT for number in range(int((last - first) / BEAT))]


@pytest.mark.parametrize("ahead", CLOCKS)
def test_a_run_with_a_live_run_supervisor_is_not_taken_over(run: RunDir, ahead: float) -> None:
    messages, clock = list[str](), FakeClock()
    Another(run, clock, ahead, beats(1.0, 200.0))
    before, begun = owner_of(run), clock.now
    with pytest.raises(UserError, match="is in use by the MPIJob gpt-one"):
        Ownership(run, pod(run, "two"), clock).settle_with_others(60.0, messages.append)
    assert owner_of(run) == before
    (message,) = messages
    assert "gpt-one" in message
    assert clock.now - begun == pytest.approx(60.0 + ALIVE, abs=2 * POLL), (
        "the grace period of a pod that was just deleted"
    )


@pytest.mark.parametrize("ahead", CLOCKS)
def test_a_silent_run_supervisor_is_fenced_off(run: RunDir, ahead: float) -> None:
    """It still held the lock, as on a file server that has lost contact with its node."""
    clock = FakeClock()
    begun = clock.now
    Another(run, clock, ahead, [1.0, 6.0])
    Ownership(run, pod(run, "two"), clock).settle_with_others(300.0, lambda text: None)
    assert json.loads(run.owner.read_text())["job"] == "gpt-two"
    assert clock.now - begun == pytest.approx(6.0 + ALIVE, abs=3 * POLL)


def test_a_lock_that_a_fenced_run_supervisor_never_lets_go_of(run: RunDir) -> None:
    clock = FakeClock()
    Ownership(run, pod(run, "two")).renew()
    lock, begun = hold(run.lock), clock.now
    with pytest.raises(OrtflowError, match="stays locked"):
        Ownership(run, pod(run, "two"), clock).settle_with_others(300.0, lambda text: None)
    os.close(lock)
    assert clock.now - begun == pytest.approx(OLD_SUPERVISOR, abs=1.0)


def test_time_in_which_the_volume_does_not_answer_does_not_count(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file server that hangs delays the other's heartbeats as well as our reads of them."""
    clock, hangs = FakeClock(), iter([1.5 * ALIVE])

    def slow(path: Path, seconds: float, given: Clock) -> bool:
        given.sleep(next(hangs, 0.0))
        return wait_free(path, seconds, given)

    monkeypatch.setattr(ownership, "wait_free", slow)
    Another(run, clock, 0.0, beats(1.5 * ALIVE + BEAT, 10 * ALIVE))
    with pytest.raises(UserError, match="is in use"):
        Ownership(run, pod(run, "two"), clock).settle_with_others(ALIVE, lambda text: None)


def test_heartbeats_continue_while_nothing_else_does(run: RunDir) -> None:
    """As while `prepare` runs: from a separate thread, by the real clock."""
    ours, seen = Ownership(run, pod(run, "one"), beat=0.01), set[int]()
    ours.renew()
    ours.watch()

    def beats_seen() -> int:
        with suppress(FileNotFoundError):
            seen.add((run.root / ".run_supervisor").stat().st_mtime_ns)
        return len(seen)

    wait_until(lambda: beats_seen() >= 3)
