"""Sweeps: several runs of one run file with different values, recorded beside the run directories.

RUNS/NAME-0, RUNS/NAME-1, … are runs like any other; RUNS/NAME.sweep records the values of each. Requests to a scheduler
for all of them are also recorded there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ortflow.workflow.errors import UserError
from ortflow.workflow.run.rundir import RunDir, write_atomically
from ortflow.workflow.system.files import read_whole

SUFFIX = ".sweep"
"""Suffix of the folder's name; no run has it."""


@dataclass(frozen=True)
class Member:
    """One run of a sweep."""

    run: RunDir
    values: Mapping[str, str]
    """Values by key, as written."""


@dataclass(frozen=True)
class Sweep:
    """The runs ROOT-0, ROOT-1, … in this order."""

    root: Path
    members: tuple[Member, ...]

    @property
    def name(self) -> str:
        """The name of the sweep."""
        return self.root.name

    @property
    def folder(self) -> Path:
        """The records of the whole sweep."""
        return folder_of(self.root)

    @property
    def keys(self) -> list[str]:
        """The keys that differ between the runs."""
        return list(self.members[0].values)

    @property
    def runs(self) -> list[RunDir]:
        """The runs' directories."""
        return [member.run for member in self.members]

    def write(self) -> None:
        """Write it to disk."""
        runs = [{"run": member.run.root.name, "values": dict(member.values)} for member in self.members]
        text = json.dumps({"name": self.name, "runs": runs}, indent=1)
        write_atomically(_file(self.root), f"{text}\n".encode())


@dataclass(frozen=True)
class SweepDir(RunDir):
    """The folder of a sweep, which keeps records of its submissions as a run directory does.

    Each record is also in the directory of each run, with the run's task.
    """

    runs: Mapping[int, RunDir] = field(default_factory=dict)
    """Those that are submitted, by task."""
    earlier: int = 0
    """Number of records of earlier submissions, which have ended and say nothing about these."""

    def read_attempts(self) -> list[dict[str, Any]]:
        """Records of this submission alone, with all its tries."""
        return super().read_attempts()[self.earlier :]

    def record_attempt(self, **fields: Any) -> None:
        """Append a record to all runs, first to the sweep's own directory, which represents all."""
        super().record_attempt(**fields)
        for task, run in self.runs.items():
            run.record_attempt(**fields, task=str(task))


def folder_of(root: Path) -> Path:
    """ROOT.sweep."""
    return root.with_name(root.name + SUFFIX)


def member_root(root: Path, task: int | str) -> Path:
    """ROOT-TASK."""
    return root.with_name(f"{root.name}-{task}")


def is_sweep(root: Path) -> bool:
    """Whether there is a sweep of this name."""
    return _file(root).is_file()


def read_sweep(root: Path) -> Sweep:
    """The sweep ROOT; raises UserError if its record cannot be read."""
    try:
        content = json.loads(read_whole(_file(root)))
        members = tuple(
            Member(RunDir(root.with_name(str(run["run"]))), {str(k): str(v) for k, v in run["values"].items()})
            for run in content["runs"]
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{_file(root)} is not a record of a sweep", fix="submit the sweep again with --fresh"
        ) from error
    if not members:
        raise UserError(f"{_file(root)} names no run", fix="submit the sweep again with --fresh")
    return Sweep(root, members)


def _file(root: Path) -> Path:
    return folder_of(root) / "sweep.json"
