"""A search of `ortflow tune` on a cluster that is killed in between, and its table."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

PATIENCE = 180.0
"""Seconds until the search has come so far."""


def killed_in_between(
    arguments: tuple[str, ...], folder: Path, environment: Mapping[str, str], reached: Callable[[], bool]
) -> None:
    """Start `ortflow ARGUMENTS` in a folder, and kill it when `reached` says so."""
    command = [sys.executable, "-m", "ortflow", *arguments]
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, cwd=folder, env=dict(environment), text=True, **streams) as search:
        end = time.monotonic() + PATIENCE
        while not reached() and search.poll() is None and time.monotonic() < end:
            time.sleep(0.2)
        running, there = search.poll() is None, reached()
        search.send_signal(signal.SIGKILL)
        output, _ = search.communicate()
    assert running, f"the search has ended\n{output}"
    assert there, f"the trials have not come so far\n{output}"


def rows(output: str) -> list[list[str]]:
    """The words of the table's rows of trials, without the mark of the best one."""
    below = output[output.index("NAME") :].splitlines()[1:]
    lines = [[word for word in line.split() if word != "*"] for line in below]
    return [words for words in lines if len(words) == 6 and "-" in words[0]]
