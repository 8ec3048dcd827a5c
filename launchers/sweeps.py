"""Several runs of one run file with other values each: what belongs together, on record beside the run directories.

RUNS/NAME-0, RUNS/NAME-1, … are runs like any other; RUNS/NAME.sweep tells which values each has. What a scheduler is
asked about all of them together is on record there too.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ortflow.workflow.errors import UserError
from ortflow.workflow.files import read_whole
from ortflow.workflow.rundir import RunDir, write_atomically

SUFFIX = ".sweep"
"""Of the folder's name; no run is called so."""


@dataclass(frozen=True)
class Member:
    """One run of a sweep."""

    run: RunDir
    values: Mapping[str, str]
    """By key, as they were written."""


@dataclass(frozen=True)
class Sweep:
    """The runs ROOT-0, ROOT-1, … in this order."""

    root: Path
    members: tuple[Member, ...]

    @property
    def name(self) -> str:
        """How people call it."""
        return self.root.name

    @property
    def folder(self) -> Path:
        """What is on record about all of them."""
        return folder_of(self.root)

    @property
    def keys(self) -> list[str]:
        """What differs between the runs."""
        return list(self.members[0].values)

    @property
    def runs(self) -> list[RunDir]:
        """The runs' directories."""
        return [member.run for member in self.members]

    def write(self) -> None:
        """Put it on record."""
        runs = [{"run": member.run.root.name, "values": dict(member.values)} for member in self.members]
        text = json.dumps({"name": self.name, "runs": runs}, indent=1)
        write_atomically(_file(self.root), f"{text}\n".encode())


@dataclass(frozen=True)
class SweepDir(RunDir):
    """The folder of a sweep, which keeps records of its submissions as a run directory does.

    What is recorded here is so in the directory of each run as well, with the run's task.
    """

    runs: Mapping[int, RunDir] = field(default_factory=dict)
    """Those that are submitted, by task."""
    begun: float = field(default_factory=time.time)
    """Unix time; what was submitted before has ended, and tells nothing of these."""

    def read_attempts(self) -> list[dict[str, Any]]:
        """Records of this submission alone, with all its tries."""
        return [record for record in super().read_attempts() if record.get("time", 0.0) >= self.begun]

    def record_attempt(self, **fields: Any) -> None:
        """Append a record to all; the sweep's own is first, as it stands for all."""
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
    """Whether there is one of this name."""
    return _file(root).is_file()


def read_sweep(root: Path) -> Sweep:
    """The sweep ROOT; raises UserError where its record cannot be read."""
    try:
        told = json.loads(read_whole(_file(root)))
        members = tuple(
            Member(RunDir(root.with_name(str(run["run"]))), {str(k): str(v) for k, v in run["values"].items()})
            for run in told["runs"]
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{_file(root)} is not a record of a sweep", fix="submit the sweep again with --fresh"
        ) from error
    if not members:
        raise UserError(f"{_file(root)} names no run", fix="submit the sweep again with --fresh")
    return Sweep(root, members)


def _file(root: Path) -> Path:
    return folder_of(root) / "sweep.json"
