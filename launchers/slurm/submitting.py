"""Handing a job to Slurm so that a run is never there twice, whatever the controller answers, or does not.

Each try has an id of its own, on record before sbatch is called and in the job's comment. A controller that is slow
takes a job and says so too late, so after every doubt, and before another try, the queue is asked for the run's jobs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from ortflow.launchers.remote.arrival import submit_record
from ortflow.launchers.slurm.commands import NoAnswer, Refused, Settings, Slurm
from ortflow.launchers.slurm.history import SETTLE, by_hand, find, in_doubt, placed
from ortflow.launchers.slurm.jobs import Job
from ortflow.launchers.slurm.refusals import refusal
from ortflow.workflow.clock import Clock
from ortflow.workflow.errors import OrtflowError
from ortflow.workflow.rundir import RunDir, write_atomically

FOLDER = "slurm"
"""In the run directory: the script, and what `submitit.SlurmJob` finds of a job."""
SCRIPT = "job.sh"
PATIENCE = 11.5
"""Seconds until whoever submits is told that nobody answers."""
DAY = 86400.0
PAUSE = 2.0
"""Seconds between two looks at the queue, or two tries."""

_NOT_SENT = re.compile(r"connect failure|Connection refused", re.IGNORECASE)
"""sbatch has reached nobody: there is no doubt."""
_DIRECTIVE = re.compile(r"^#SBATCH --([a-z-]+)", re.MULTILINE)
_NAMES = {
    "timelimit": "time", "mem-per-node": "mem", "no-requeue": "requeue", "array-inx": "array", "wait": "wait",
}  # fmt: skip
"""Environment variables of sbatch that are not called as their option is."""
_NEVER = {"array", "wait", "error", "input", "wrap"}
"""Options that no submission of a run may take from the environment."""


class InDoubt(OrtflowError):
    """Nobody answers, and the job may be in the queue or not."""


def new_submission() -> str:
    """An id that no other submission has."""
    return os.urandom(8).hex()


def place(
    run: RunDir, script: Callable[[str], str], slurm: Slurm, retry: float, *, ask: str | None = None
) -> tuple[str, str]:
    """Submit the script that `script` makes for a submission's id; the id and the job.

    Tries again for `retry` seconds while the controller is away. Raises UserError with sbatch's own words, NoAnswer
    where nothing was submitted, InDoubt where that is not known; `ask` is the command that tells later.
    """
    begun = slurm.clock.monotonic()
    end = begun + retry
    while True:
        submission = new_submission()
        run.record_attempt(event="submitting", launcher="slurm", submission=submission, **submit_record())
        try:
            return submission, _sbatch(run, script(submission), slurm)
        except Refused as error:
            run.record_attempt(event="refused", submission=submission, why=error.words)
            raise refusal(error.words) from error
        except NoAnswer as error:
            if _NOT_SENT.search(error.words):
                run.record_attempt(event="refused", submission=submission, why=error.words)
                if slurm.clock.monotonic() + PAUSE >= end:
                    raise NoAnswer(
                        error.words, then="nothing was submitted; try again later, or wait with --retry"
                    ) from error
            elif (job := _look(run, slurm, begun, end, error, ask or f"ortflow status {run.root}")) is not None:
                return submission, job
        slurm.clock.sleep(PAUSE)


def _look(run: RunDir, slurm: Slurm, begun: float, end: float, doubt: NoAnswer, ask: str) -> str | None:
    """The job that sbatch gave no answer about; None where it is safe to submit another. Raises InDoubt."""
    sent = slurm.clock.monotonic()
    while True:
        now = slurm.clock.monotonic()
        patience = max(1.0, begun + PATIENCE - now) if end <= now else None
        try:
            job = active(run, slurm, patience)
            if job is not None:
                return job.id
            # It may still be on its way through a controller that has begun to answer others.
            if in_doubt(run.read_attempts()) is None or now >= sent + SETTLE:
                return None
        except NoAnswer:
            pass
        if slurm.clock.monotonic() + PAUSE >= max(end, begun + PATIENCE):
            raise InDoubt(
                f"the Slurm controller did not answer in time ({doubt.words}), and may have taken the job or not; "
                f"`{ask}` tells when it answers again, and submitting again starts no second one"
            ) from doubt
        slurm.clock.sleep(PAUSE)


def settle(run: RunDir, slurm: Slurm) -> Job | None:
    """The run's job, if it waits or runs; waits for one that may still be on its way. Raises NoAnswer."""
    begun = slurm.clock.monotonic()
    while True:
        job = active(run, slurm, by_hand_too=True)
        since = in_doubt(run.read_attempts())
        if job is not None or since is None or waited(since, begun, SETTLE, slurm.clock):
            return job
        slurm.clock.sleep(PAUSE)


def waited(since: float, begun: float, seconds: float, clock: Clock) -> bool:
    """Whether so many seconds are over since the Unix time `since`, which another machine may have written.

    Clocks of two machines may be hours apart: our own has to see the seconds pass, from its moment `begun` on. A day is
    no difference of clocks.
    """
    return clock.monotonic() >= begun + seconds or clock.time() - since > DAY


def active(run: RunDir, slurm: Slurm, patience: float | None = None, *, by_hand_too: bool = False) -> Job | None:
    """The run's job, if it waits or runs; `by_hand_too`: one that a person has submitted, too. Raises NoAnswer.

    Nobody is asked after a run that is new: where a job by hand waits for it, that leaves when it finds another.
    """
    history = placed(run.read_attempts())
    more = [by_hand(run.root)] if by_hand_too else []
    job = find([*more, *history], slurm.mine(patience)) if history else None
    return job if job is not None and job.active else None


def _sbatch(run: RunDir, text: str, slurm: Slurm) -> str:
    folder = run.root / FOLDER
    folder.mkdir(exist_ok=True)
    # Where a batch job's output cannot be written, Slurm starts nothing and says next to nothing.
    (run.root / "logs").mkdir(exist_ok=True)
    write_atomically(folder / SCRIPT, text.encode())
    job = slurm.submit(str(folder / SCRIPT), settings(text, os.environ, Path.cwd()))
    write_atomically(folder / f"{job.partition('_')[0]}_submission.sh", text.encode())
    return job


def settings(script: str, environment: Mapping[str, str], folder: Path) -> Settings:
    """What changes in the environment that sbatch reads, and hands on to the job. Pure.

    Variables of sbatch win over directives: those that would change what the script says are taken away. Relative
    entries of PYTHONPATH become absolute, seen from `folder`, because the job runs elsewhere.
    """
    said = {*_DIRECTIVE.findall(script), *_NEVER} | ({"requeue"} if "#SBATCH --no-requeue" in script else set())
    changes: dict[str, str | None] = {}
    for name in environment:
        option = name.removeprefix("SBATCH_").lower().replace("_", "-")
        if name.startswith("SBATCH_") and _NAMES.get(option, option) in said:
            changes[name] = None
    if entries := environment.get("PYTHONPATH"):
        changes["PYTHONPATH"] = os.pathsep.join(os.path.join(folder, entry) for entry in entries.split(os.pathsep))
    return changes
