"""A sweep as one job array of Slurm: the number of the task selects the run directory in its script."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ortflow.launchers.batch.history import by_hand
from ortflow.launchers.slurm.commands import Slurm
from ortflow.launchers.slurm.launcher import SlurmRequest
from ortflow.launchers.sweeps import Sweep
from ortflow.workflow.errors import OrtflowError, UserError

LARGEST_SCRIPT = 4 << 20
"""Bytes of a batch script that Slurm accepts by default (SchedulerParameters=max_script_size, since 20.11)."""


@dataclass(frozen=True)
class SweepRequest:
    """The job array of a sweep."""

    sweep: Sweep
    requests: tuple[SlurmRequest, ...]
    """The request of each run, by task."""
    at_once: int | None = None
    """Maximum number of tasks at a time."""

    def script(self, submission_id: str, tasks: Sequence[int], run_file: str | None = None) -> str:
        """The array's batch script; raises UserError if the runs would need several."""
        from ortflow.manifests.slurm import script
        from ortflow.manifests.slurm.placement import TASK

        root = self.sweep.root.with_name(f"{self.sweep.name}-{TASK}")
        array = ranges(tasks) + (f"%{self.at_once}" if self.at_once is not None else "")
        placement = replace(
            self.requests[0].by_hand, run_dir=root, submission=submission_id, array=array, run_file=run_file
        )
        specs = [self.requests[task].submission.spec for task in tasks]
        texts = {script(spec.model_copy(update={"name": self.sweep.name}), placement) for spec in specs}
        if len(texts) > 1:
            raise UserError(
                f"{', '.join(self.sweep.keys)} would change the batch script, and a job array has one for all its runs",
                fix="submit them one by one; if containers mount different paths, mount one folder that holds all",
            )
        return texts.pop()

    def __str__(self) -> str:
        from ortflow.manifests.array import run_files

        files = run_files([request.submission.spec.model_dump() for request in self.requests])
        submission = str(by_hand(self.sweep.root).submission)
        text = self.script(submission, range(len(self.requests)), files).rstrip("\n")
        check_size(text, len(self.requests))
        return text


def check_size(script: str, runs: int) -> None:
    """Raise UserError if sbatch refuses a script that contains the files of so many runs."""
    size = len(script.encode())
    if size > LARGEST_SCRIPT:
        raise UserError(
            f"--set asks for {runs} runs, whose run files make a script of {size:,} bytes, and sbatch accepts "
            f"{LARGEST_SCRIPT:,} (max_script_size)",
            fix="submit them with `ortflow submit`, whose script contains no run files, or give fewer values",
        )


def check_length(runs: int, slurm: Slurm) -> None:
    """Raise UserError if this Slurm allows no array of so many tasks; if the limit is unknown, sbatch checks it."""
    try:
        longest = slurm.longest_array()
    except OrtflowError:
        return
    if longest is not None and runs > longest[0]:
        raise UserError(
            f"--set asks for {runs} runs, and a job array of this Slurm has at most {longest[0]} ({longest[1]})",
            fix="give fewer values, or submit several sweeps",
        )


def ranges(numbers: Sequence[int]) -> str:
    """0-3,5 for 0, 1, 2, 3, 5. Pure."""
    parts = []
    for _, group in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        members = [number for _, number in group]
        parts.append(f"{members[0]}-{members[-1]}" if len(members) > 1 else str(members[0]))
    return ",".join(parts)
