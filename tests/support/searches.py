"""A search of `ortflow tune` on a cluster that is killed in between and continued, and its table."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

RATES = (0.005, 0.0005, 0.002)
SEARCH: dict[str, Any] = {
    "train__steps": 8,
    "train__evaluation": {"every_steps": 4},
    "tune": {"space": {"train.optimizer.lr": [*RATES]}, "sampler": "grid"},
}
"""Of a run file: three trials, search-0 to search-2, of 8 steps."""
PATIENCE = 180.0
"""Seconds until the search has come so far."""


def killed_in_between(
    arguments: tuple[str, ...], folder: Path, environment: Mapping[str, str], newest_step: Callable[[], int]
) -> None:
    """Start `ortflow ARGUMENTS` in a folder, and kill it when two trials are submitted and the first one trains.

    The second one may wait for cores until the first has ended; by then the search would have submitted a third.
    """
    command = [sys.executable, "-u", "-m", "ortflow", *arguments]
    log = folder / "killed-search.log"
    with (
        log.open("w") as output,
        subprocess.Popen(
            command, cwd=folder, env=dict(environment), stdin=subprocess.DEVNULL, stdout=output, stderr=output
        ) as search,
    ):
        end = time.monotonic() + PATIENCE
        while not (under_way := "search-1 starts" in log.read_text() and newest_step() >= 1):
            if search.poll() is not None or time.monotonic() > end:
                break
            time.sleep(0.2)
        running = search.poll() is None
        search.send_signal(signal.SIGKILL)
    assert running, f"the search has ended\n{log.read_text()}"
    assert under_way, f"the trials have not come so far\n{log.read_text()}"
    assert "search-2" not in log.read_text(), "two at a time"


def rows(output: str) -> list[list[str]]:
    """The words of the table's rows of trials, without the mark of the best one."""
    below = output[output.index("NAME") :].splitlines()[1:]
    lines = [[word for word in line.split() if word != "*"] for line in below]
    return [words for words in lines if len(words) == 6 and "-" in words[0]]


def check_continued(output: str, losses: Sequence[float], backend: str) -> None:
    """What a continued search prints whose first trial ended while no search followed it; `losses` are the trials'."""
    assert "search-0 is finished, and is followed" in output
    assert "search-2 starts: train.optimizer.lr=0.002" in output
    assert rows(output) == [
        [f"search-{number}", f"{rate}", "3", "finished", "8", f"{loss:.6g}"]
        for number, (rate, loss) in enumerate(zip(RATES, losses, strict=True))
    ]
    assert f"best: search-{losses.index(min(losses))}, loss" in output
    assert f"; ortflow submit --backend {backend} " in output
