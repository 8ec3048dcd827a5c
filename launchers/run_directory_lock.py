"""Taking a run directory: created, locked, and checked to hold this run; otherwise left unchanged.

Used by a launcher before it starts anything. A run in the directory is continued if the run file still asks
for the same training; settings that do not change it may differ.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ortflow.launchers.attempts.locks import HeldError, hold
from ortflow.launchers.attempts.tail import last_records
from ortflow.launchers.base import Submission, launcher_name
from ortflow.launchers.changes import (
    LENGTHENS,
    agree,
    batch_messages,
    continued_run,
    differences,
    refuse,
    refuse_other_kind,
    within,
)
from ortflow.launchers.checkpoint_folder import folder_to_put_aside, put_aside, refuse_filled
from ortflow.launchers.copies import original
from ortflow.launchers.records import State, next_attempt, state
from ortflow.launchers.supervision.moved_directory import is_same
from ortflow.workflow.errors import OrtflowError, UserError
from ortflow.workflow.run.record import ATTEMPTS, damage_message, set_aside
from ortflow.workflow.run.rundir import OWN_FILES, RunDir, write_atomically
from ortflow.workflow.spec.checks.batch import KEY
from ortflow.workflow.spec.file.dump import dump_run_file
from ortflow.workflow.spec.file.load import load_run_file
from ortflow.workflow.spec.file.paths import moved
from ortflow.workflow.spec.run import RunSpec, TrainerRunSpec
from ortflow.workflow.steps.run_plan import number_in
from ortflow.workflow.system import own_files
from ortflow.workflow.system.disk_space import RECORDS, OutOfDisk, is_full
from ortflow.workflow.system.files import free_name

_PASSING = re.compile(rf"\.(launcher|ranks)\.lock|{own_files.TEMPORARY}")
"""Content of a directory that another launcher is about to take, or was taking when it was killed."""


@dataclass
class Opened:
    """A run directory that this process has taken; `lock` holds it."""

    run: RunDir
    spec: RunSpec
    lock: int
    notes: tuple[str, ...] = ()
    """Messages for the user before it starts."""
    finished: bool = False
    """There is nothing left to do."""
    handed_over: bool = False
    """Another process holds the lock now and is responsible for the directory."""


@contextmanager
def opened(submission: Submission, check: Callable[[], None] | None = None) -> Iterator[Opened]:
    """Take the directory, and release it after the block; `check` is called under the lock, before any change.

    Raises UserError if it is in use, holds something else, or cannot be created. If the block raises, or ends
    without an attempt or with one that refused its input, a directory that was created here is removed again.
    """
    run = submission.run
    _refuse_strangers(run)
    new_folder = _make(run.root)
    try:
        lock = _lock(run)
    except OutOfDisk:
        if new_folder is not None and _empty(run):
            _remove(run.root, new_folder)
        raise
    result = None
    try:
        if check is not None:
            check()
        if submission.fresh and not _empty(run):
            lock = _put_aside(run, lock, folder_to_put_aside(run, submission.spec))
        new = _empty(run)
        try:
            result = _settle(submission, lock, new)
            yield result
        finally:
            # The directory may have been renamed meanwhile, and another run may be in its place.
            is_in_place = is_same(run.root, lock, run.lock.name)
            if new and is_in_place and _worthless(run) and not (result and result.handed_over):
                _remove(run.root, new_folder)
    finally:
        os.close(lock)


def _settle(submission: Submission, lock: int, new: bool) -> Opened:
    run, spec = submission.run, submission.spec
    records = run.read_attempts()
    if (other := original(run, records, launcher_name(records))) is not None:
        # Before the run file names this place: from here on the other's jobs are not ours.
        run.record_attempt(event="copied", of=str(other))
    if new:
        refuse_filled(run, spec)
        agree(spec)
        write_atomically(run.run_file, dump_run_file(spec).encode())
        return Opened(run, spec, lock)
    if not run.run_file.exists():
        raise _not_a_run(run.root)
    before = moved(load_run_file(run.run_file), run.root)
    refuse_other_kind(run.root, before, spec)
    refuse(run.root, differences(before.model_dump(), spec.model_dump()))
    messages: list[str] = []
    if isinstance(before, TrainerRunSpec) and isinstance(spec, TrainerRunSpec):
        batch = begun_batch(run, before)
        spec = continued_run(before, spec, batch)
        messages = batch_messages(before, spec, batch)
    changes = differences(before.model_dump(), spec.model_dump())
    if state(run.read_attempts(), alive=False) is State.FINISHED and not any(
        within(change.key, LENGTHENS) for change in changes
    ):
        return Opened(run, before, lock, finished=True)
    write_atomically(run.run_file, dump_run_file(spec).encode())
    notes = [*messages, *(str(change) for change in changes if change.key != KEY)]
    if message := damage_message(run.attempts, set_aside(run.attempts, ATTEMPTS), aside=True):
        notes.append(message)
    if notes:
        change_records = [change._asdict() for change in changes]
        run.record_attempt(
            event="changed", attempt=next_attempt(run.read_attempts()), changes=change_records, notes=notes
        )
    return Opened(run, spec, lock, tuple(notes))


def begun_batch(run: RunDir, before: TrainerRunSpec) -> int:
    """Samples per step of the run so far: from the plan that ranks have written, else from its run file."""
    if before.train.global_batch is None:
        return number_in(run.plan, "global_batch") or before.global_batch
    return before.global_batch


def _make(root: Path) -> Path | None:
    """Create the folder; returns the topmost created one, or None if all existed."""
    topmost = None
    for folder in (root, *root.parents):
        if folder.exists():
            break
        topmost = folder
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if topmost is not None:
            for folder in (root, *root.parents):
                if folder.is_relative_to(topmost):
                    with suppress(OSError):  # not made, or not empty
                        folder.rmdir()
        raise _unwritable(root, error) from error
    return topmost


def _lock(run: RunDir) -> int:
    try:
        return hold(run.lock)
    except HeldError as error:
        raise UserError(
            f"{run.root} is in use by process {error.holder.get('pid', '?')} on {error.holder.get('host', '?')}",
            fix=f"follow it with `ortflow logs -f {run.root}`, stop it with `ortflow cancel {run.root}`",
        ) from error
    except OSError as error:
        raise _unwritable(run.root, error) from error


def _unwritable(root: Path, error: OSError) -> OrtflowError:
    if is_full(error):
        return OutOfDisk(root, RECORDS)
    if error.filename is not None and Path(error.filename) != root:
        root = Path(error.filename)
    return UserError(f"{root} cannot be written: {error.strerror}", where="run_dir", fix="choose another run_dir")


def _refuse_strangers(run: RunDir) -> None:
    """Raise UserError if the directory holds something other than a run; nothing is created there before."""
    if run.root.is_dir() and not run.is_ours and not all(map(_PASSING.fullmatch, os.listdir(run.root))):
        if run.attempts.is_file() and not run.run_file.is_file():
            # A run whose own run file was lost, or replaced by a device, a folder or a link to nothing.
            state = "is not a file" if os.path.lexists(run.run_file) else "is missing"
            raise UserError(f"{run.run_file} {state}", where="run_dir", fix="restore it, or choose another run_dir")
        raise _not_a_run(run.root)


def _not_a_run(root: Path) -> UserError:
    return UserError(f"{root} is neither empty nor a run directory", where="run_dir", fix="choose another run_dir")


def _put_aside(run: RunDir, lock: int, checkpoints: Path | None) -> int:
    """Rename the directory, with its run file, to the first free NAME.N, and create a new one.

    So are `checkpoints`, the folder of its checkpoints outside it.
    """
    folder = None if checkpoints is None else put_aside(checkpoints)
    aside = free_name(run.root)
    try:
        run.root.rename(aside)
    except OSError as error:
        if checkpoints is not None and folder is not None:
            folder.rename(checkpoints)
        raise UserError(
            f"{run.root} cannot be put aside: {error.strerror}", where="run_dir", fix="choose another run_dir"
        ) from error
    old = RunDir(aside)
    if old.run_file.exists():
        spec = moved(load_run_file(old.run_file), aside)
        if folder is not None:
            section = spec.checkpoint.model_copy(update={"directory": str(folder)})
            spec = spec.model_copy(update={"checkpoint": section})
        write_atomically(old.run_file, dump_run_file(spec).encode())
    run.root.mkdir()
    new = _lock(run)
    os.close(lock)
    return new


def _empty(run: RunDir) -> bool:
    """Whether nothing is lost if the directory is used for another run."""
    names = os.listdir(run.root)
    return all(map(_PASSING.fullmatch, names)) or (run.run_file.name in names and _worthless(run))


def _worthless(run: RunDir) -> bool:
    """Whether the run did nothing: no attempt, or only one that refused its input before the first step."""
    attempts = [record for record in run.read_attempts() if record.get("event") in ("start", "end")]
    if attempts and (len(attempts) > 2 or attempts[-1].get("outcome") != "user_error"):
        return False
    return not any(record.get("event") == "step" for record in last_records(run.events(0)))


def _remove(root: Path, topmost: Path | None) -> None:
    """Remove what a run without a step left: its own files, and the folders that were created for it."""
    own_files.clear(root.resolve(), OWN_FILES)
    if topmost is None:
        return
    for folder in (root, *root.parents):
        if not folder.is_relative_to(topmost) or any(folder.iterdir()):
            return
        folder.rmdir()
