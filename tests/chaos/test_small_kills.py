"""Random signals to random processes of runs that take a second: each ends bit-identical, and nothing is left.

ORTFLOW_TRIALS=1000 pytest -m chaos tests/chaos/test_small_kills.py      # a thousand; 30 if nothing is said
    ... -n 16 -p no:cacheprovider                                        # side by side, with pytest-xdist
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from project import FEW_CORES, leftovers, logs
from tiny_runs import Tiny, has_traceback, result
from waits import PATIENCE

pytestmark = pytest.mark.chaos
TRIALS = int(os.environ.get("ORTFLOW_TRIALS", "30"))
ASKS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
KILLS = (
    signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGQUIT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL,
    signal.SIGTRAP, signal.SIGSYS, signal.SIGXCPU, signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF,
)  # fmt: skip
IGNORED = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD, signal.SIGWINCH, signal.SIGURG)
"""By Python, or by the kernel where nobody handles them."""
SIGNALS = (*ASKS, *KILLS, *IGNORED, signal.SIGSTOP)
SLOW = {"restart": {"failures": 50, "backoff": {"first": 0.0, "limit": 0.0}}}


def make(folder: Path, ranks: int) -> Tiny:
    return Tiny.make(folder, **SLOW, resources={"ranks_per_node": ranks, "cpus_per_rank": 1})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, float]]:
    """By number of ranks, a run that nobody touched, and its seconds."""
    found = {}
    for ranks in (1, 2):
        tiny = make(tmp_path_factory.mktemp("whole"), ranks)
        done = tiny.command("run", "run.yaml")
        assert done.code == 0, done.said
        found[ranks] = tiny.run_dir, done.seconds
    return found


def victims(launcher: subprocess.Popen[str], chance: random.Random) -> list[psutil.Process]:
    """The launcher, one process below it, or all of them."""
    with suppress(psutil.Error):
        root = psutil.Process(launcher.pid)
        below = root.children(recursive=True)
        return chance.choice(([root], [chance.choice(below)] if below else [root], below or [root], [root, *below]))
    return []


def disturb(launcher: subprocess.Popen[str], chance: random.Random) -> str:
    number = chance.choice(SIGNALS)
    struck = victims(launcher, chance)
    for process in struck:
        with suppress(psutil.Error):
            if number in KILLS and process.pid == launcher.pid:
                # The launcher's own crash is a kill: no core, no message.
                process.kill()
            else:
                process.send_signal(number)
    if number == signal.SIGSTOP:
        time.sleep(chance.uniform(0.0, 1.0))
        for process in struck:
            with suppress(psutil.Error):
                process.send_signal(signal.SIGCONT)
    return f"{number.name} to {len(struck)}"


def shared_memory() -> set[str]:
    """Names in this machine's shared memory; none where other trials run beside this one."""
    if "PYTEST_XDIST_WORKER" in os.environ or not Path("/dev/shm").is_dir():
        return set()
    return {path.name for path in Path("/dev/shm").iterdir()}


@pytest.mark.rotates
@pytest.mark.parametrize("number", range(TRIALS))
def test_a_random_signal(tmp_path: Path, whole: dict[int, tuple[Path, float]], number: int) -> None:
    chance = random.Random(number)
    ranks = 1 + number % 2
    tiny, (undisturbed, seconds), shared = make(tmp_path / "p", ranks), whole[ranks], shared_memory()
    # Of every four trials with two ranks, one has MPICH's own waiting, as users' runs.
    settings = {} if number % 8 == 1 else FEW_CORES
    history = []
    for _ in range(chance.choice((1, 1, 2, 3))):
        launcher = tiny.start("run", "run.yaml", **settings)
        time.sleep(chance.uniform(0.0, seconds))
        history.append(disturb(launcher, chance))
        try:
            out, err = launcher.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{history}\n{logs(tiny.run_dir)}") from None
        history.append(f"{launcher.returncode}")
        # Before Python can hear a signal, it kills; behind that a run leaves with 75, or has ended.
        assert launcher.returncode in (0, 1, 75, 130) or launcher.returncode < 0, f"{history}\n{out}{err}"
        # One that hits while Python itself starts is Python's to report.
        assert not has_traceback(out + err) or "KeyboardInterrupt" in err, f"{history}\n{out}{err}"
    done = tiny.command("run", "run.yaml")
    assert done.code == 0, f"{history}\n{done.said}\n{logs(tiny.run_dir)}"
    assert result(tiny.run_dir) == result(undisturbed), history
    assert leftovers(tiny.run_dir) == [], history
    temporaries = [*tiny.run_dir.rglob(".*.*-????????"), *tiny.run_dir.glob(".run.yaml.*")]
    assert temporaries == [], history
    assert shared_memory() <= shared, history
