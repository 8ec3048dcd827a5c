"""The launcher pod under a fake clock: what it waits for, how long, and with which exit code it ends."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_attempts import FakeAttempt
from fake_clock import FakeClock
from messages import mentions
from signal_handlers import restored

from ortflow.launchers.attempts.locks import hold
from ortflow.launchers.kubernetes import ending
from ortflow.launchers.kubernetes.attempt import PROBE, SILENCE, PodAttempt
from ortflow.launchers.kubernetes.pod import FINISHED, Pod
from ortflow.launchers.kubernetes.run_supervisor import MARGIN, OLD_RANKS, RunSupervisor
from ortflow.launchers.kubernetes.unready_workers import UnreadyWorkers
from ortflow.launchers.kubernetes.worker import OPERATOR, Worker
from ortflow.launchers.kubernetes.worker_report import WorkerReport, write_report
from ortflow.launchers.stop import write_request
from ortflow.launchers.supervision.attempt import RankCommand
from ortflow.manifests.local import Mpi
from ortflow.workflow.errors import EXIT_DONE, EXIT_FAILURE, EXIT_PREEMPTED
from ortflow.workflow.run.fence import DELAY
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.spec.file.dump import dump_run_file
from ortflow.workflow.spec.file.load import load_run_text
from ortflow.workflow.spec.file.paths import resolve_paths
from ortflow.workflow.spec.run import TrainerRunSpec

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


class PlannedSupervisor(RunSupervisor):
    """A supervisor process whose attempts follow `planned`."""

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
    """The volume, with a fake termination log and restored signal handlers."""
    monkeypatch.setattr(ending, "TERMINATION", tmp_path / "termination-log")
    for file in ("m.onnx", "d.arrow"):
        (tmp_path / file).touch()
    with restored(signal.SIGTERM, signal.SIGINT):
        yield tmp_path


def spec_of(folder: Path) -> TrainerRunSpec:
    text = RUN.format(run_dir=folder / "gpt")
    return resolve_paths(load_run_text(text, "run.yaml"), folder / "run.yaml")


def run_supervisor_of(folder: Path, clock: FakeClock, *planned: dict[str, Any]) -> PlannedSupervisor:
    spec = spec_of(folder)
    pod = Pod("gpt-abc", "uid", folder / "run.yaml", folder, 2222, new_budget=False, fresh=False)
    run_supervisor = PlannedSupervisor(pod, spec, folder, clock)
    run_supervisor.planned, run_supervisor.started = list(planned), []
    return run_supervisor


def ends(folder: Path) -> list[dict[str, Any]]:
    return [record for record in RunDir(folder / "gpt").read_attempts() if record["event"] in ("end", "stop")]


def released(folder: Path) -> bool:
    file = folder / ".ortflow" / "gpt-abc" / "released"
    return file.exists() and not file.read_text().startswith(FINISHED)


def test_a_run_that_finishes(folder: Path, clock: FakeClock) -> None:
    assert run_supervisor_of(folder, clock, {"seconds": 100.0}).keep() == EXIT_DONE
    assert not released(folder), "the operator ends the workers of a run that has succeeded"
    pod = Pod("gpt-abc", "uid", folder / "run.yaml", folder, 2222, new_budget=False, fresh=False)
    assert (pod.release() or "").startswith(FINISHED), "unless a container beside the launcher does not end"
    worker = Worker.__new__(Worker)
    worker._pod, worker._released, worker._leaves_at = pod, None, 0.0
    assert [worker._is_released(now) for now in (100.0, 100.0 + OPERATOR - 1, 100.0 + OPERATOR)] == [False, False, True]


def test_a_later_launcher_pod_reports_what_an_earlier_one_found_changed(
    folder: Path, clock: FakeClock, capsys: pytest.CaptureFixture[str]
) -> None:
    """The earlier one ended before it began an attempt."""
    run_supervisor, run = run_supervisor_of(folder, clock, {"seconds": 100.0}), RunDir(folder / "gpt")
    run.root.mkdir()
    run.run_file.write_text(dump_run_file(spec_of(folder)))
    run.record_attempt(event="changed", attempt=0, notes=["resources.nodes: 2 before, 1 now"])
    assert run_supervisor.keep() == EXIT_DONE
    assert capsys.readouterr().out.count("  resources.nodes: 2 before, 1 now\n") == 1


def test_a_failure_is_followed_by_another_attempt_in_the_same_pod(folder: Path, clock: FakeClock) -> None:
    run_supervisor = run_supervisor_of(folder, clock, {"code": 1, "seconds": 100.0}, {"seconds": 50.0})
    assert run_supervisor.keep() == EXIT_DONE
    first, second = run_supervisor.started
    assert second.started_at - first.started_at == pytest.approx(100.0 + 30.0, abs=1.0)


def test_a_budget_that_is_spent_lets_the_workers_go(folder: Path, clock: FakeClock) -> None:
    fails = {"code": 1, "seconds": 10.0}
    assert run_supervisor_of(folder, clock, fails, fails).keep() == EXIT_FAILURE
    assert released(folder)
    assert "budget" in (folder / "termination-log").read_text()


def test_the_kubelets_signal_leaves_time_for_the_run_supervisor(folder: Path, clock: FakeClock) -> None:
    run_supervisor = run_supervisor_of(folder, clock, {})
    clock.after(100.0, lambda: signal.raise_signal(signal.SIGTERM))
    begun = clock.now
    assert run_supervisor.keep() == EXIT_PREEMPTED
    (attempt,) = run_supervisor.started
    assert attempt.killed_at == pytest.approx(begun + 100.0 + GRACE - MARGIN, abs=1.0)
    assert not released(folder), "the next launcher pod continues with the same workers"


def test_the_time_limit_is_of_this_pod(folder: Path, clock: FakeClock) -> None:
    run_supervisor = run_supervisor_of(folder, clock, {"leaves_after": 5.0})
    begun = clock.now
    assert run_supervisor.keep() == EXIT_PREEMPTED
    assert run_supervisor.started[0].asked_at == pytest.approx(begun + 600.0, abs=1.0)
    assert released(folder)


def test_a_cancelled_run_ends_for_good(folder: Path, clock: FakeClock) -> None:
    run_supervisor = run_supervisor_of(folder, clock, {"leaves_after": 5.0})
    clock.after(20.0, lambda: write_request(RunDir(folder / "gpt").stop_request, "cancel"))
    assert run_supervisor.keep() == EXIT_PREEMPTED
    assert ends(folder)[-1]["asked"] == "cancel"
    assert released(folder)


@pytest.mark.parametrize("lets_go_after", [OLD_RANKS / 2, None])
def test_ranks_of_an_earlier_attempt_are_waited_for_and_then_fenced_off(
    folder: Path, clock: FakeClock, capsys: pytest.CaptureFixture[str], lets_go_after: float | None
) -> None:
    run_supervisor, run = run_supervisor_of(folder, clock), RunDir(folder / "gpt")
    run.root.mkdir()
    lock, begun = hold(run.ranks_lock), clock.now
    if lets_go_after is not None:
        clock.after(lets_go_after, lambda: os.close(lock))
    run_supervisor.wait_for_old_ranks()
    fenced = "fenced off" in capsys.readouterr().out
    if lets_go_after is None:
        os.close(lock)
        assert fenced
        assert clock.now - begun == pytest.approx(OLD_RANKS + 2 * DELAY, abs=1.0)
    else:
        assert not fenced
        assert clock.now - begun == pytest.approx(lets_go_after, abs=1.0)


def test_a_host_is_lost_after_its_silence(folder: Path, clock: FakeClock) -> None:
    """Nothing listens on the port, as on a node without power. No rank has started: `poll` still searches for them."""
    pod = Pod("gpt-abc", "uid", folder / "run.yaml", folder, 1, new_budget=False, fresh=False)
    run = RunDir(folder / "gpt")
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    attempt = PodAttempt(RankCommand(run, 0, command, os.environ), "mpich", pod, {"127.0.0.1": "127.0.0.1"}, 2, clock)
    try:
        begun = clock.now
        while attempt.poll() is None and not attempt.gone():
            assert clock.now < begun + 2 * SILENCE
            clock.sleep(0.5)
        assert SILENCE < clock.now - begun <= SILENCE + PROBE + 1.0
        assert attempt.gone() == [0, 1]
    finally:
        attempt.kill()


def test_a_host_that_is_slow_to_greet_is_not_lost(folder: Path, clock: FakeClock) -> None:
    """Its kernel takes connections: so does a node on which the ssh daemon has to wait for its turn, and ranks work."""
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    with socket.create_server(("127.0.0.1", 0), backlog=100) as server:
        port = server.getsockname()[1]
        pod = Pod("gpt-abc", "uid", folder / "run.yaml", folder, port, new_budget=False, fresh=False)
        run = RunDir(folder / "gpt")
        attempt = PodAttempt(
            RankCommand(run, 0, command, os.environ), "mpich", pod, {"127.0.0.1": "127.0.0.1"}, 2, clock
        )
        try:
            begun = clock.now
            while clock.now < begun + 2 * SILENCE:
                assert attempt.poll() is None
                assert not attempt.gone()
                clock.sleep(PROBE)
        finally:
            attempt.kill()


def test_a_worker_on_an_excluded_node_is_waited_for_elsewhere(folder: Path, clock: FakeClock) -> None:
    run_supervisor, said = run_supervisor_of(folder, clock), list[str]()
    pod = run_supervisor._pod
    unready = UnreadyWorkers(pod, said.append, clock, ["n2"])
    write_report(pod, "gpt-worker-0", WorkerReport("10.0.0.1", 1.0, node="n2"))
    assert unready("gpt-worker-0.gpt", "10.0.0.1")
    assert unready("gpt-worker-0.gpt", "10.0.0.1")
    assert said == ["gpt-worker-0 is on n2, which is excluded: waiting for it on another node"]
    assert not unready("gpt-worker-0.gpt", "10.0.0.2"), "another pod of the name, whose report is not there yet"
    write_report(pod, "gpt-worker-0", WorkerReport("10.0.0.2", 1.0, node="n1"))
    assert not unready("gpt-worker-0.gpt", "10.0.0.2")


def test_a_worker_that_cannot_leave_an_excluded_node_is_used(folder: Path, clock: FakeClock) -> None:
    """The supervisor in the cluster records the refusal while the launcher waits already."""
    run_supervisor, said = run_supervisor_of(folder, clock), list[str]()
    pod, run = run_supervisor._pod, run_supervisor._run
    run.root.mkdir(parents=True, exist_ok=True)
    unready = UnreadyWorkers(pod, said.append, clock, ["n2"], run_supervisor._retained)
    write_report(pod, "gpt-worker-0", WorkerReport("10.0.0.1", 1.0, node="n2"))
    assert unready("gpt-worker-0.gpt", "10.0.0.1")
    run.record_attempt(event="retain", nodes=["n2"], why="a policy")
    assert not unready("gpt-worker-0.gpt", "10.0.0.1")
    assert not unready("gpt-worker-0.gpt", "10.0.0.1")
    assert mentions(said[-1], "gpt-worker-0 is on n2", "stays there: a policy")
    assert len(said) == 2
    assert not run_supervisor._replaces_nodes(["n2"]), "a preflight that fails on it again ends the run"


@pytest.mark.parametrize(
    ("supervisor", "own", "moves"), [(True, "n1", True), (True, "n2", False), (False, "n1", False)]
)
def test_who_gives_a_run_other_nodes(folder: Path, clock: FakeClock, supervisor: bool, own: str, moves: bool) -> None:
    """Without a supervisor in the cluster nobody does, and the pod of a launcher that runs ranks stays where it is."""
    run_supervisor = run_supervisor_of(folder, clock)
    spec = run_supervisor._spec
    backend = spec.backends.kubernetes.model_copy(update={"supervisor": supervisor, "launcher_as_worker": True})
    backends = spec.backends.model_copy(update={"kubernetes": backend})
    run_supervisor._spec = spec.model_copy(update={"backends": backends})
    run_supervisor._pod = replace(run_supervisor._pod, node=own)
    assert run_supervisor._replaces_nodes(["n2"]) is moves
    run_supervisor._run.root.mkdir(parents=True, exist_ok=True)
    run_supervisor._run.record_attempt(event="retain", nodes=["n3"], why="a policy")
    assert run_supervisor._replaces_nodes(["n2", "n3"]) is moves, "a node that cannot be left holds back no other"
    assert not run_supervisor._replaces_nodes(["n3"])
