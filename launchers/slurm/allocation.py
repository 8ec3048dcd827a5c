"""The nodes of a job, and whether Slurm has more of them, for an elastic run. Used inside its job."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from ortflow.launchers.slurm.commands import Slurm
from ortflow.launchers.slurm.runner import Settings
from ortflow.launchers.slurm.site import read_nodes
from ortflow.workflow.errors import OrtflowError

SOON = 5.0
"""Seconds from now at which a job still starts now: Slurm's times are whole seconds."""
_EXCLUDE = re.compile(r"^#SBATCH --exclude[= ]\"?([^\s\"]+)", re.MULTILINE)
_EXPECTED = re.compile(r"Job \S+ to start at (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d) using")


def hostnames(slurm: Slurm, nodes: str) -> list[str]:
    """The names in Slurm's notation for several nodes: `n[1-3]`."""
    answer = slurm.answer(["scontrol", "show", "hostnames", nodes])
    if answer.code:
        raise OrtflowError(f"scontrol failed: {answer.message}")
    return answer.out.split()


def lost(slurm: Slurm, names: Sequence[str]) -> list[str]:
    """Those of some nodes that are down, or that do not answer the controller."""
    if not names:
        return []
    nodes = read_nodes(slurm.answer(["scontrol", "show", "node", "--oneliner", ",".join(names)]).out)
    return [node.name for node in nodes if node.name in names and not node.up]


def would_start(slurm: Slurm, script: Path, nodes: int, without: Sequence[str]) -> bool:
    """Whether a job of a script would start now on so many nodes, `without` some of them. Submits nothing."""
    start = expected_start(slurm, script, nodes, without)
    return start is not None and start <= slurm.clock.time() + SOON


def expected_start(slurm: Slurm, script: Path, nodes: int, without: Sequence[str]) -> float | None:
    """When a job of a script would start on so many nodes, `without` some of them, in Unix time; None if it never can.

    Slurm itself answers (`sbatch --test-only`), so that partition, constraints, memory and limits count. Submits
    nothing.
    """
    # sbatch takes an option of its command line in place of the directive: --exclude would drop the script's own nodes,
    # and a dependency or begin time of the script would only delay the answer.
    excluded = [*without, *_EXCLUDE.findall(script.read_text(encoding="utf-8", errors="replace"))]
    command = [
        "sbatch", "--test-only", f"--nodes={nodes}", f"--exclude={','.join(excluded)}", "--dependency=", "--begin=now",
        str(script),
    ]  # fmt: skip
    # Variables of sbatch override directives, too (sbatch(1)).
    settings: Settings = {"LC_ALL": "C", **{name: None for name in os.environ if name.startswith("SBATCH_")}}
    answer = slurm.answer(command, settings)
    # sbatch --test-only answers on standard error, as a message of sbatch.
    expected = _EXPECTED.search(f"{answer.err}\n{answer.out}")
    return None if answer.code or expected is None else datetime.fromisoformat(expected[1]).timestamp()
