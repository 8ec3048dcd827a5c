"""Programs of other frameworks on two ranks: killed by SIGKILL, stopped by SIGTERM, resumed, and near one process.

Each case is two runs: a calm one, started by the framework's own launcher where it has one, and one with accidents.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from program_runs import Programs

pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="process groups and adoption of orphans are Linux's")

PROGRAMS = Path(__file__).parent / "programs"
RANKS = ("--ranks", "2", "checkpoint.every_seconds=null", "checkpoint.every_steps=3")
STEPS, STOPPED = 12, 7
"""Steps of each program, and the step in which one asks to be stopped."""


def needs(package: str) -> None:
    """Skip where a framework is not installed: CI on Linux installs each (.ci/install_torch)."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def lines(log: str, kind: str) -> list[list[str]]:
    """The words of a program's own lines. The launcher of Horovod puts the rank before each."""
    words = [line.partition(":")[2].split() if "<stdout>" in line else line.split() for line in log.splitlines()]
    return [rest for first, *rest in filter(None, words) if first == kind]


def check(
    folder: Path, program: str, *arguments: str, saved: int = 3, start: str = "direct", with_accidents: str = "direct"
) -> None:
    """Compare a calm run, one with accidents, and a process without the framework.

    A program prints `step N NAME LOSS` for each step, `stopped N`, `final NAME DIGEST`, and on rank 0 `plain N LOSS`.
    Killed after step 5, it resumes from step `saved`. The runs' processes are started by ortflow or by a launcher.
    """
    programs = Programs(folder)
    programs.write((PROGRAMS / program).read_text())
    code, output = programs.run("train.py", *RANKS, "--name", "calm", "--start", start, "--", *arguments, seconds=280)
    assert code == 0, output
    calm = [programs.log(rank, "calm") for rank in logged(start)]
    code, output = programs.run(
        "train.py", *RANKS, "--start", with_accidents, "--", *arguments, "accidents", seconds=280
    )
    assert code == 0, output
    assert ("was killed by SIGKILL" if with_accidents == "direct" else "ended with exit code 1") in output
    logs = [[programs.log(rank, attempt=attempt) for attempt in range(3)] for rank in logged(with_accidents)]

    finals = sorted(final for log in calm for final in lines(log, "final"))
    assert len(finals) in (2, 6)  # on each rank, of each engine
    assert sorted(final for log in logs for final in lines(log[2], "final")) == finals
    stops = [int(words[0]) for log in logs for words in lines(log[1], "stopped")]
    assert len(stops) == 2
    assert len(set(stops)) == 1  # both ranks after the same step
    assert STOPPED < stops[0] < STEPS
    assert f"resumed at step {stops[0]}" in output
    for log in logs:
        assert [int(lines(text, "step")[0][0]) for text in log] == [0, saved, stops[0]]

    plain = {words[0]: float(words[1]) for words in lines(calm[0], "plain")}
    assert len(plain) == STEPS
    for number, _, loss in (words for log in (calm, *logs) for text in log for words in lines(text, "step")):
        assert float(loss) == pytest.approx(plain[number], rel=1e-5)
    assert programs.left() == []


def logged(start: str) -> tuple[int, ...]:
    """The ranks whose programs have a log of their own; that of rank 0 has the output of a launcher."""
    return (0, 1) if start == "direct" else (0,)


@pytest.mark.rotates("deepspeed")
def test_deepspeed_zero_is_killed_and_resumes(tmp_path: Path) -> None:
    needs("deepspeed")
    check(tmp_path, "deepspeed_engines.py", "zero", start="deepspeed")


@pytest.mark.rotates("deepspeed")
def test_engines_that_accumulate_are_saved_after_an_update(tmp_path: Path) -> None:
    """Level 2. A checkpoint is due after step 3, in the middle of an update."""
    needs("deepspeed")
    check(tmp_path, "deepspeed_engines.py", "accumulating", saved=4)


@pytest.mark.rotates("deepspeed")
def test_a_deepspeed_pipeline_is_killed_and_resumes(tmp_path: Path) -> None:
    needs("deepspeed")
    check(tmp_path, "deepspeed_engines.py", "pipeline")


@pytest.mark.rotates
@pytest.mark.parametrize("level", [1, 2])
def test_jax_is_killed_and_resumes(tmp_path: Path, level: int) -> None:
    needs("jax")
    check(tmp_path, "jax_processes.py", f"level-{level}")


@pytest.mark.rotates
@pytest.mark.parametrize("level", [1, 2])
def test_horovod_is_killed_and_resumes(tmp_path: Path, level: int) -> None:
    """Without MPI, horovodrun alone brings the ranks together."""
    needs("horovod")
    check(tmp_path, "horovod_ranks.py", f"level-{level}", start="horovod", with_accidents="horovod")
    world = lines(Programs(tmp_path).log(0, "calm"), "world")
    assert sorted(world) == [["0", "2", "0", "0", "1"], ["1", "2", "1", "0", "1"]]
