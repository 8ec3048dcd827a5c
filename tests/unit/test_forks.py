"""Commands in forks end as new processes do (tests/support/forks.py)."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from costs import processor_seconds
from forks import SPENT, Ended, Forks, run_command
from waits import PATIENCE

SCRIPT = """
import atexit, os, signal, sys, time
print(os.getcwd(), sys.argv[1:], os.environ.get("ORTFLOW_X"), sys.stdin.read(), signal.getsignal(signal.SIGCHLD).name)
atexit.register(print, "exit", flush=True)
match sys.argv[1]:
    case "error": raise ValueError("wrong")
    case "code": sys.exit(7)
    case "kill": os.kill(os.getpid(), signal.SIGKILL)
    case "busy":
        while time.process_time() < 0.2: pass
    case "child":
        if os.fork() == 0: time.sleep(30)
    case "meet":
        open(sys.argv[2], "w").close()
        while not os.path.exists(sys.argv[3]): time.sleep(0.01)
"""


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    forks = Forks("json", environment=os.environ)
    yield forks
    forks.end()


@pytest.fixture(autouse=True)
def script(tmp_path: Path) -> Path:
    """Written once: another thread's fork may be about to read it."""
    path = tmp_path / "scripts" / "script.py"
    path.parent.mkdir()
    path.write_text(SCRIPT)
    return path


def run(forks: Forks, folder: Path, *arguments: str, timeout: float = PATIENCE) -> Ended:
    script = folder / "scripts" / "script.py"
    environment = {**os.environ, "ORTFLOW_X": "1"}
    return forks.run(str(script), *arguments, folder=folder, environment=environment, timeout=timeout)


def test_a_fork_ends_as_a_process(forks: Forks, tmp_path: Path) -> None:
    done = {name: run(forks, tmp_path, name) for name in ("good", "error", "code", "kill")}
    assert {name: each.returncode for name, each in done.items()} == {
        "good": 0, "error": 1, "code": 7, "kill": -signal.SIGKILL,
    }  # fmt: skip
    for name, each in done.items():
        lines = each.stdout.splitlines()
        assert name == "kill" or lines[0] == f"{tmp_path} ['{name}'] 1  SIG_DFL"
        assert ("exit" in lines) == (name != "kill")
    assert done["error"].stderr.endswith("ValueError: wrong\n")


def test_forks_run_beside_each_other_and_are_measured(forks: Forks, tmp_path: Path) -> None:
    before = SPENT[0]
    names = [str(tmp_path / name) for name in "ab"]
    other = threading.Thread(target=run, args=(forks, tmp_path, "meet", *names))
    other.start()
    assert run(forks, tmp_path, "meet", *reversed(names)).returncode == 0
    other.join()
    assert run(forks, tmp_path, "busy").peak > 1 << 20
    assert SPENT[0] - before > 0.2


def test_what_holds_the_output_open_is_an_error(forks: Forks, tmp_path: Path) -> None:
    """As in `subprocess.run`: a command that leaves a process behind does not pass."""
    with pytest.raises(subprocess.TimeoutExpired):
        run(forks, tmp_path, "child", timeout=0.5)


def test_where_an_interpreter_would_start_differently_none_is_forked(tmp_path: Path) -> None:
    """The first command under an environment is a new process. Later ones are forks, also with other free variables."""
    forked = []
    paths = {"PYTHONPATH": "/x"}
    for changes in ({}, {"ORTFLOW_X": "1"}, paths, paths, {"HOME": "/x"}, {"SLURM_X": "1"}):
        environment = {**os.environ, "LANGUAGE": "test-forks", **changes}
        done = run_command("--version", folder=tmp_path, environment=environment, timeout=PATIENCE)
        assert (done.returncode, done.stderr) == (0, "")
        forked.append(isinstance(done, Ended))
    assert forked == [False, True, False, False, False, True]
    (tmp_path / "yaml.py").touch()
    environment = {**os.environ, "LANGUAGE": "test-forks"}
    assert not isinstance(run_command("--version", folder=tmp_path, environment=environment, timeout=PATIENCE), Ended)


def test_the_forking_process_ends_with_its_parent() -> None:
    forks = Forks("json", environment=os.environ)
    begun = time.monotonic()
    forks.end()
    assert forks.process.returncode == 0
    assert time.monotonic() - begun < PATIENCE / 2


def test_what_forks_spent_is_spent_by_the_process_of_tests(tmp_path: Path) -> None:
    """.ci/run lists the processor time of lanes by what their processes have waited for."""
    before = processor_seconds() - SPENT[0]
    forks = Forks(environment=os.environ)
    assert run(forks, tmp_path, "busy").returncode == 0
    forks.end()
    assert processor_seconds() - SPENT[0] - before > 0.2
