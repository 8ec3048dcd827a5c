"""Runs that are compared: started by the local launcher in directories of their own, and ended after their last step.

Used by `prove`. Raises what `ortflow run` would: wrong input is UserError, a failure OrtflowError.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ortflow.launchers.attempts.locks import HeldError, hold
from ortflow.launchers.attempts.tail import last_lines
from ortflow.launchers.base import Submission
from ortflow.launchers.local import LocalLauncher
from ortflow.launchers.run_directory_lock import Opened
from ortflow.launchers.starting import Ending, run_here
from ortflow.launchers.stop import write_request
from ortflow.workflow.errors import EXIT_FAILURE, EXIT_PREEMPTED, EXIT_USER, OrtflowError, Preempted, UserError
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.run.strike import FOLDER_VARIABLE, Plan, waiting

MARKER = ".prove"
"""A file by which the folder of the runs is known."""
TRACE = "trace"
"""In the folder of each run, beside its run directory."""


@dataclass(frozen=True)
class Proof:
    """A run that has been made."""

    run: RunDir
    trace: Path
    """The folder of the plan, and of a program's traces."""


@contextmanager
def folder_of_runs(run: RunDir) -> Iterator[Path]:
    """An empty folder beside a run directory, NAME.prove, locked. It is removed after the block, and kept if the block
    raises anything but UserError and Preempted.

    Raises UserError if it is in use, or not of `ortflow prove`.
    """
    # Inside the run directory it would keep `ortflow run` from taking the directory.
    folder = run.root.with_name(f"{run.root.name}.prove")
    marker, is_new = folder / MARKER, not folder.parent.exists()
    if folder.exists() and not marker.is_file():
        raise UserError(f"{folder} is not a folder of `ortflow prove`", fix="rename it, or choose another name")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = hold(marker)
    except HeldError as error:
        raise UserError(f"{folder} is in use by process {error.holder.get('pid', '?')}", fix="wait for it") from error
    try:
        _remove_runs(folder)
        for path in folder.iterdir():
            if path != marker:
                raise UserError(f"{path} is not of `ortflow prove`", fix="move it to another folder")
        try:
            yield folder
        except (UserError, Preempted):
            _remove(folder, with_parent=is_new)
            raise
        _remove(folder, with_parent=is_new)
    finally:
        os.close(lock)


def _remove_runs(folder: Path) -> None:
    """Delete what `make_run` has made."""
    for path in folder.iterdir():
        if not path.is_symlink() and (path / TRACE).is_dir():
            shutil.rmtree(path)


def _remove(folder: Path, *, with_parent: bool) -> None:
    _remove_runs(folder)
    (folder / MARKER).unlink()
    with suppress(OSError):  # somebody has put a file there
        folder.rmdir()
        if with_parent:
            folder.parent.rmdir()


def make_run(submission: Submission, folder: Path, name: str, plan: Plan, environment: Mapping[str, str]) -> Proof:
    """Make a run as submitted, but in a folder of its own.

    Returns when its ranks have done the plan's last step, or the run has ended. Raises UserError, OrtflowError or
    Preempted if it ends in another way.
    """
    run, trace = RunDir(folder / name / "run"), folder / name / TRACE
    trace.mkdir(parents=True)
    plan.write(trace)
    spec = submission.spec.model_copy(update={"run_dir": str(run.root)})
    view = _View(run, trace, spec.world_size)
    with _variables({**environment, FOLDER_VARIABLE: str(trace)}):
        request = LocalLauncher().request(replace(submission, spec=spec, run=run))
        ending = run_here(request, view.of)
    if not view.complete:
        _check(ending, run, name, view.messages)
    return Proof(run, trace)


def _check(ending: Ending, run: RunDir, name: str, messages: list[str]) -> None:
    """Raise an error unless a run has ended by itself."""
    if ending.code == EXIT_USER:
        raise UserError(f"the {name} run: {ending.cause}")
    if ending.code == EXIT_PREEMPTED:
        raise Preempted(f"stopped: {ending.reason or ending.cause}")
    if ending.code == EXIT_FAILURE:
        log = "\n".join(last_lines(run.log(0, 0), 8))
        message = f"the {name} run failed: {ending.cause}; {ending.reason}; its logs are in {run.root / 'logs'}"
        raise OrtflowError("\n".join([message, *messages[-1:], log]))


class _View:
    """Ends the run when all its ranks wait."""

    def __init__(self, run: RunDir, trace: Path, ranks: int) -> None:
        self._run, self._trace, self._ranks = run, trace, ranks
        self.complete = False
        """All ranks have done the plan's last step."""
        self.messages: list[str] = []

    @contextmanager
    def of(self, opened: Opened) -> Iterator[_View]:
        """As a view of `run_here`."""
        yield self

    def record(self, record: Mapping[str, Any]) -> None:
        """Nothing to show."""

    def attempt(self, number: int) -> None:
        """Nothing to show."""

    def message(self, text: str) -> None:
        """Kept for the error of a run that fails."""
        self.messages.append(text)

    def tick(self) -> None:
        """Kill the ranks when the last of them waits."""
        if not self.complete and waiting(self._trace) >= self._ranks:
            self.complete = True
            write_request(self._run.stop_request, "cancel", now=True)


@contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
