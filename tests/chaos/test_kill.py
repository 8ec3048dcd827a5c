"""Kills and signals at random moments: whatever happens, the end is that of a run never touched.

pytest -m chaos tests/chaos                    # 30 kills, 30 signals
ORTFLOW_CHAOS=4 pytest -m chaos tests/chaos    # a short round
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from project import FEW_CORES, ORTFLOW, Project, curve, environment, evaluations, leftovers, logs, of_kind
from waits import PATIENCE

pytestmark = pytest.mark.chaos
MOMENTS = int(os.environ.get("ORTFLOW_CHAOS", "30"))
KILLS_A_RUN = 5
LEAVES_WITHIN = 15.0
"""Seconds from SIGTERM to the end; the next longer limit is the grace of 30. Ranks that start hear it when Python has
imported what they need, which takes 6 s on two cores with eleven other processes."""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project.make(tmp_path_factory.mktemp("chaos"))


@pytest.fixture(scope="module")
def timed(project: Project) -> tuple[Path, float]:
    """An undisturbed run, and how long it took from start to end."""
    start = time.monotonic()
    launcher = begin(project, project.write("undisturbed", **SHAPE), **FEW_CORES)
    assert launcher.wait(timeout=120) == 0, logs(project.run_dir("undisturbed"))
    return project.run_dir("undisturbed"), time.monotonic() - start


@pytest.fixture(scope="module")
def undisturbed(timed: tuple[Path, float]) -> Path:
    return timed[0]


SHAPE = {"train__steps": 120, "train__evaluation": {"every_steps": 15}, "checkpoint__every_steps": 4}


@pytest.fixture(scope="module")
def seconds(timed: tuple[Path, float]) -> float:
    """How long a run takes, so that moments spread over all of it."""
    return timed[1]


def settings_of(number: int) -> dict[str, str]:
    """Every fourth trial has MPICH's own, as users' runs. The others take a third of their processor time.

    The sum of two ranks is the same in any order, so that all have the same bits.
    """
    return {} if number % 4 == 0 else FEW_CORES


def begin(project: Project, file: Path, **settings: str) -> subprocess.Popen[bytes]:
    with (project.folder / "launcher.out").open("ab") as out:
        return subprocess.Popen(
            [*ORTFLOW, "run", file.name], cwd=project.folder, env=environment(**settings), stdin=subprocess.DEVNULL,
            stdout=out, stderr=out, start_new_session=True,
        )  # fmt: skip


def ranks_of(launcher: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Rank processes under a launcher, by rank."""
    found = []
    for process in descendants(launcher.pid):
        try:
            command = process.cmdline()
        except psutil.Error:
            continue
        if "ortflow.workflow.rank" in command and "mpi" not in command[0]:
            found.append(process)
    return found


def descendants(pid: int) -> Iterator[psutil.Process]:
    try:
        yield from psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return


def kill_rank(launcher: subprocess.Popen[bytes], number: int) -> None:
    ranks = ranks_of(launcher)
    if len(ranks) > number:
        with suppress(psutil.NoSuchProcess):
            ranks[number].kill()


def kill_all(launcher: subprocess.Popen[bytes]) -> None:
    for process in list(descendants(launcher.pid)):
        try:
            process.kill()
        except psutil.Error:
            continue


def kill_launcher(launcher: subprocess.Popen[bytes]) -> None:
    launcher.kill()


VICTIMS: dict[str, Callable[[subprocess.Popen[bytes]], None]] = {
    "rank 0": lambda launcher: kill_rank(launcher, 0),
    "rank 1": lambda launcher: kill_rank(launcher, 1),
    "all but the launcher": kill_all,
    "the launcher": kill_launcher,
}


def same_end(run_dir: Path, undisturbed: Path) -> None:
    for rank in (0, 1):
        steps = [step for step, *_ in curve(run_dir, rank)]
        assert steps == sorted(set(steps)), "a step stands twice in the record"
        assert curve(run_dir, rank) == curve(undisturbed, rank)
    assert evaluations(run_dir) == evaluations(undisturbed)
    assert (run_dir / "export/model.onnx").read_bytes() == (undisturbed / "export/model.onnx").read_bytes()
    assert leftovers(run_dir) == []


@pytest.mark.parametrize("number", range(max(1, MOMENTS // KILLS_A_RUN)))
def test_kill_9_at_random_moments(project: Project, undisturbed: Path, seconds: float, number: int) -> None:
    chance = random.Random(number)
    name = f"killed-{number}"
    file = project.write(name, **SHAPE)
    history = []
    launcher = begin(project, file, **settings_of(number))
    for _ in range(KILLS_A_RUN):
        wait, victim = chance.uniform(0.0, seconds), chance.choice(list(VICTIMS))
        time.sleep(wait)
        history.append(f"{wait:.2f} s: {victim}")
        VICTIMS[victim](launcher)
        if victim == "the launcher" or launcher.poll() is not None:
            launcher.wait()
            launcher = begin(project, file, **settings_of(number))
    assert launcher.wait(timeout=120) == 0, f"{history}\n{logs(project.run_dir(name))}"
    same_end(project.run_dir(name), undisturbed)


@pytest.mark.parametrize("number", range(MOMENTS))
def test_sigterm_at_random_moments(project: Project, undisturbed: Path, seconds: float, number: int) -> None:
    chance = random.Random(1000 + number)
    name = f"asked-{number}"
    file = project.write(name, **SHAPE)
    launcher = begin(project, file, **settings_of(number))
    time.sleep(chance.uniform(0.0, seconds))
    to_ranks = chance.random() < 0.5
    asked = time.monotonic()
    if to_ranks:
        # As a scheduler does: every process of the step gets it, the launcher too.
        for rank in ranks_of(launcher):
            with suppress(psutil.NoSuchProcess):
                rank.send_signal(signal.SIGTERM)
    launcher.send_signal(signal.SIGTERM)
    code = launcher.wait(timeout=PATIENCE)
    took = time.monotonic() - asked
    run_dir = project.run_dir(name)
    done = bool(run_dir.exists() and of_kind(run_dir, "finished")) if (run_dir / "events").exists() else False
    assert code == (0 if done else 75) or not run_dir.exists(), logs(run_dir)
    assert took < LEAVES_WITHIN, f"left after {took:.1f} s\n{logs(run_dir)}"
    before = [step for step, *_ in curve(run_dir)] if (run_dir / "events").exists() else []
    final = begin(project, file, **settings_of(number))
    assert final.wait(timeout=120) == 0, logs(run_dir)
    same_end(run_dir, undisturbed)
    assert not of_kind(run_dir, "rewind"), f"work was lost: {before[-1:]}"
