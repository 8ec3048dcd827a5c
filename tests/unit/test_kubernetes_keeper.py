"""The launcher pod under a fake clock: what it waits for, how long, and with which exit code it ends."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_attempts import FakeAttempt
from fake_clock import FakeClock

from ortflow.launchers.kubernetes import ending
from ortflow.launchers.kubernetes.attempt import LOOK, SILENCE, PodAttempt
from ortflow.launchers.kubernetes.keeper import MARGIN, OLD_RANKS, Keeper
from ortflow.launchers.kubernetes.pod import Pod
from ortflow.launchers.locks import hold
from ortflow.launchers.stop import write_request
from ortflow.manifests.local import Mpi
from ortflow.workflow.errors import EXIT_DONE, EXIT_FAILURE, EXIT_PREEMPTED
from ortflow.workflow.fence import DELAY
from ortflow.workflow.rundir import RunDir
from ortflow.workflow.spec.file.load import load_run_text
from ortflow.workflow.spec.file.paths import resolve_paths

RUN = """\
name: gpt
run_dir: {run_dir}
model: {{path: m.onnx, loss: mse}}
data: {{train: {{path: d.arrow}}, micro_batch: 1}}
train: {{steps: 10, optimizer: {{name: sgd, lr: 0.1}}}}
restart: {{failures: 1, backoff: {{first: 30}}}}
resources: {{time_limit: "00:10:00"}}
backends: {{kubernetes: {{image: "localhost/ortflow:test", grace_seconds: 60, volume: {{claim: mine}}}}}}
"""
MPI = Mpi("mpich", "mpirun")
GRACE = 60.0


class KeeperOf(Keeper):
    """A keeper whose attempts are as `planned` says."""

    planned: list[dict[str, Any]]
    started: list[FakeAttempt]

    def _find_mpi(self) -> Mpi:
        return MPI

    def _start(self, number: int, mpi: Mpi) -> Any:
        self.started.append(FakeAttempt(self._clock, number, **self.planned[number]))  # type: ignore[arg-type]
        return self.started[-1]


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The volume; the pod's termination log and signals are not this process's."""
    monkeypatch.setattr(ending, "TERMINATION", tmp_path / "termination-log")
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    for file in ("m.onnx", "d.arrow"):
        (tmp_path / file).touch()
    yield tmp_path
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def keeper_of(folder: Path, clock: FakeClock, *planned: dict[str, Any]) -> KeeperOf:
    text = RUN.format(run_dir=folder / "gpt")
    spec = resolve_paths(load_run_text(text, "run.yaml"), folder / "run.yaml")
    pod = Pod("gpt-abc", "uid", folder / "run.yaml", folder, 2222, new_budget=False, fresh=False)
    keeper = KeeperOf(pod, spec, folder, clock)
    keeper.planned, keeper.started = list(planned), []
    return keeper


def ends(folder: Path) -> list[dict[str, Any]]:
    return [record for record in RunDir(folder / "gpt").read_attempts() if record["event"] in ("end", "stop")]


def released(folder: Path) -> bool:
    return (folder / ".ortflow" / "gpt-abc" / "released").exists()


def test_a_run_that_finishes(folder: Path, clock: FakeClock) -> None:
    assert keeper_of(folder, clock, {"seconds": 100.0}).keep() == EXIT_DONE
    assert not released(folder), "the operator ends the workers of a run that has succeeded"


def test_a_failure_is_followed_by_another_attempt_in_the_same_pod(folder: Path, clock: FakeClock) -> None:
    keeper = keeper_of(folder, clock, {"code": 1, "seconds": 100.0}, {"seconds": 50.0})
    assert keeper.keep() == EXIT_DONE
    first, second = keeper.started
    assert second.started_at - first.started_at == pytest.approx(100.0 + 30.0, abs=1.0)


def test_a_budget_that_is_spent_lets_the_workers_go(folder: Path, clock: FakeClock) -> None:
    fails = {"code": 1, "seconds": 10.0}
    assert keeper_of(folder, clock, fails, fails).keep() == EXIT_FAILURE
    assert released(folder)
    assert "budget" in (folder / "termination-log").read_text()


def test_the_kubelets_signal_leaves_time_for_the_keeper(folder: Path, clock: FakeClock) -> None:
    keeper = keeper_of(folder, clock, {})
    clock.after(100.0, lambda: signal.raise_signal(signal.SIGTERM))
    begun = clock.now
    assert keeper.keep() == EXIT_PREEMPTED
    (attempt,) = keeper.started
    assert attempt.killed_at == pytest.approx(begun + 100.0 + GRACE - MARGIN, abs=1.0)
    assert not released(folder), "the next launcher pod goes on with the same workers"


def test_the_time_limit_is_of_this_pod(folder: Path, clock: FakeClock) -> None:
    keeper = keeper_of(folder, clock, {"leaves_after": 5.0})
    begun = clock.now
    assert keeper.keep() == EXIT_PREEMPTED
    assert keeper.started[0].asked_at == pytest.approx(begun + 600.0, abs=1.0)
    assert released(folder)


def test_a_cancelled_run_ends_for_good(folder: Path, clock: FakeClock) -> None:
    keeper = keeper_of(folder, clock, {"leaves_after": 5.0})
    clock.after(20.0, lambda: write_request(RunDir(folder / "gpt").stop_request, "cancel"))
    assert keeper.keep() == EXIT_PREEMPTED
    assert ends(folder)[-1]["asked"] == "cancel"
    assert released(folder)


@pytest.mark.parametrize("lets_go_after", [OLD_RANKS / 2, None])
def test_ranks_of_an_earlier_attempt_are_waited_for_and_then_fenced_off(
    folder: Path, clock: FakeClock, capsys: pytest.CaptureFixture[str], lets_go_after: float | None
) -> None:
    keeper, run = keeper_of(folder, clock), RunDir(folder / "gpt")
    run.root.mkdir()
    lock, begun = hold(run.ranks_lock), clock.now
    if lets_go_after is not None:
        clock.after(lets_go_after, lambda: os.close(lock))
    keeper._clear()
    fenced = "fenced off" in capsys.readouterr().out
    if lets_go_after is None:
        os.close(lock)
        assert fenced
        assert clock.now - begun == pytest.approx(OLD_RANKS + 2 * DELAY, abs=1.0)
    else:
        assert not fenced
        assert clock.now - begun == pytest.approx(lets_go_after, abs=1.0)


def test_a_host_is_lost_after_its_silence(folder: Path, clock: FakeClock) -> None:
    """Nothing listens on the port: as a node whose power is gone."""
    pod = Pod("gpt-abc", "uid", folder / "run.yaml", folder, 1, new_budget=False, fresh=False)
    run = RunDir(folder / "gpt")
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    attempt = PodAttempt(run, 0, command, os.environ, "mpich", pod, {"127.0.0.1": "127.0.0.1"}, 2, clock)
    try:
        begun = clock.now
        while not attempt.gone():
            clock.sleep(1.0)
        assert SILENCE < clock.now - begun <= SILENCE + LOOK + 1.0
        assert attempt.gone() == {0, 1}
    finally:
        attempt.kill()
