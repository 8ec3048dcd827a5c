"""The time of each stage of .ci/run, and what the machine did meanwhile.

.ci/minutes.py FOLDER      # print the tables of what `say`, `beside` and `attempt` (.ci/lib) recorded there
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

END = "end"
"""In place of a stage's name: its lane has ended."""


@dataclass(frozen=True)
class Mark:
    """A moment at which a stage of a lane began."""

    lane: str
    second: int
    jiffies: tuple[int, ...]
    """Of all cores since the machine started: user, nice, system, idle, iowait, irq, softirq, steal."""
    started: int
    """Processes and threads since the machine started. Linux counts both as one."""
    stage: str


def read_marks(text: str) -> list[Mark]:
    """Marks, one a line: lane, second, the first line of /proc/stat, its line `processes`, stage; separated by tabs."""
    marks = []
    for line in text.splitlines():
        lane, second, cpu, processes, stage = line.split("\t")
        jiffies = tuple(int(word) for word in cpu.split()[1:9])
        marks.append(Mark(lane, int(second), jiffies, int(processes.split()[1]), stage))
    return marks


def table(marks: list[Mark]) -> list[str]:
    """A line for each stage, in the order of their beginnings.

    Stages of several lanes overlap. Idle time and processes are the whole machine's while the stage ran.
    """
    lines = [f"{'from':>6} {'minutes':>8} {'idle':>5} {'started':>8}  stage"]
    for number, mark in enumerate(marks):
        after = next((other for other in marks[number + 1 :] if other.lane == mark.lane), None)
        if mark.stage == END or after is None or after.second == mark.second:
            continue
        spent = [late - early for early, late in zip(mark.jiffies, after.jiffies, strict=True)]
        idle = (spent[3] + spent[4]) / max(sum(spent), 1)
        minutes = (after.second - mark.second) / 60
        lines.append(f"{mark.second:6} {minutes:8.1f} {idle:5.0%} {after.started - mark.started:8}  {mark.stage}")
    return lines


def processor_table(text: str, a_second: int) -> list[str]:
    """A line for each lane and each attempt, those that cost the most first. A second has so many jiffies.

    What a lane spends includes its attempts. Daemons (clusters) and what was killed with its parent are in none.
    """
    rows = (line.partition(" ") for line in text.splitlines())
    spent = sorted(((int(jiffies) / a_second, name) for jiffies, _, name in rows), reverse=True)
    return [f"{'processor seconds':>17}", *(f"{seconds:17.0f}  {name}" for seconds, name in spent)]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    print("\n".join(table(read_marks((folder / "stages").read_text()))))
    if (folder / "spent").exists():
        print("", *processor_table((folder / "spent").read_text(), os.sysconf("SC_CLK_TCK")), sep="\n")
