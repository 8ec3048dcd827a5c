"""What seldom happens to the pods of a run on a real cluster: signals before the first step, damaged records, a heavy
load, attempts that lead to nothing."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from kubernetes_accidents import NOTICED
from kubernetes_cluster import ENDS, STARTS, Cluster, Run, holding, same_end, slow
from kubernetes_runs_seen import all_processes, rank_processes
from kubernetes_testbed import wait_until
from messages import mentions
from project import events

from ortflow.launchers.kubernetes.attempt import SILENCE

pytestmark = pytest.mark.chaos
MIDDLE = 15
GARBAGE = b'{"event":"step","st\x00\xff\n'


def begins(run: Run, attempt: int = 0) -> None:
    """Wait until all ranks of an attempt are in the step configure."""

    def there() -> bool:
        with suppress(OSError, ValueError):
            return len(rank_processes(run)) == 4 and all(
                any(one["event"] == "phase_start" and one["attempt"] == attempt for one in events(run.run_dir, rank))
                for rank in range(4)
            )
        return False

    wait_until(there, STARTS, run.transcript)


def terminate(processes: Sequence[psutil.Process]) -> None:
    """SIGTERM to each."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.terminate()


@pytest.mark.parametrize("which", ["ranks", "all processes"])
def test_asked_to_end_while_it_configures(cluster: Cluster, left_alone: Path, which: str) -> None:
    """That is no wrong input: the run goes on by itself."""
    run = cluster.submit("configuring", **holding(cluster, "configure", 4.0))
    begins(run)
    terminate(list(rank_processes(run).values()) if which == "ranks" else all_processes(run))
    run.finish(timeout=ENDS + 60)
    same_end(run.run_dir, left_alone)
    assert set(run.outcomes()[:-1]) <= {"preempted", "lost"}, run.transcript()
    assert len(run.outcomes()) > 1, "the signal was heard"


def test_damaged_records(cluster: Cluster, left_alone: Path) -> None:
    """The next launcher pod sets the lines aside and says so; `status` works throughout."""
    run = cluster.submit("damaged", **slow(cluster, 0.2, attempts=1))
    run.until_step(MIDDLE)
    paths = [run.run_dir / "attempts.jsonl", run.run_dir / "events/rank-0000.jsonl"]
    # Between two records: whoever writes appends whole lines.
    for path in paths:
        with path.open("ab", buffering=0) as file:
            file.write(GARBAGE)
    assert run.status()["state"] == "running"
    run.space.kubectl("delete", "pod", run.pod("launcher"), "--wait=false")
    wait_until(lambda: run.status()["state"] == "finished", ENDS, lambda: f"{run.status()}\n{damages(run)}")
    run.finish()
    same_end(run.run_dir, left_alone)
    assert run.outcomes() == ["preempted", "finished"]
    for path in paths:
        assert GARBAGE not in path.read_bytes()
        assert path.with_name(f"{path.name}.damaged").read_bytes() == GARBAGE
        assert f"moved to {path.name}.damaged" in damages(run)


def damages(run: Run) -> str:
    """All that pods have said."""
    folder = run.cluster.folder / "runs" / run.name / "logs"
    return "\n".join(path.read_text(errors="replace") for path in sorted(folder.rglob("*.log")))


@pytest.mark.parametrize("nice", [0, 19])
def test_a_heavy_load(cluster: Cluster, left_alone: Path, nice: int) -> None:
    """Workers that are slow to answer, and whose ranks work, are not given up."""
    restart = {"failures": 0, "preemptions": 0, "hung_seconds": 300.0}
    run = cluster.submit("loaded", restart=restart, **slow(cluster, 3.0))
    run.until_step(2)
    with load(50, nice):
        time.sleep(SILENCE + 30)
    run.finish(timeout=3 * ENDS)
    same_end(run.run_dir, left_alone)
    assert run.outcomes() == ["finished"], run.transcript()


@contextmanager
def load(processes: int, nice: int) -> Iterator[None]:
    """So many processes that compute."""
    command = [sys.executable, "-c", f"import os; os.nice({nice})\nwhile True: pass"]
    burning = [subprocess.Popen(command) for _ in range(processes)]
    try:
        yield
    finally:
        for process in burning:
            process.kill()
            process.wait()


def test_five_attempts_without_a_step(cluster: Cluster) -> None:
    """Then it is given up, and what `status` says is why."""
    run = cluster.submit("fruitless", **holding(cluster, "configure", 4.0))
    for attempt in range(6):
        begins(run, attempt)
        terminate(list(rank_processes(run).values()))
        wait_until(lambda attempt=attempt: len(run.outcomes()) > attempt, NOTICED, run.transcript)  # type: ignore[misc]
    why = run.records("end")[-1]["why"]
    assert mentions(why, "5 attempts"), run.transcript()
    wait_until(lambda: run.status()["why"] == why, NOTICED, lambda: str(run.status()))
    how = run.status()
    assert how["state"] not in ("pending", "running", "restarting"), how
    assert why in cluster.ortflow("status", "fruitless").stdout
    wait_until(
        lambda: not [pod for pod in run.pods("worker") if pod["status"]["phase"] == "Running"], 30, run.transcript
    )
