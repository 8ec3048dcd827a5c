"""Taking a run directory: made, locked, and checked to hold this very run, or left as it was.

Used by a launcher before it starts anything. A directory that holds a run goes on with it if the run file still asks
for the same training; what may differ is what does not change it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ortflow.launchers.base import Submission
from ortflow.launchers.changes import LENGTHENS, agree, batch_words, differences, going_on, refuse, within
from ortflow.launchers.locks import HeldError, hold
from ortflow.launchers.records import State, next_attempt, state
from ortflow.launchers.tail import last_records
from ortflow.workflow import owned
from ortflow.workflow.errors import OrtflowError, UserError
from ortflow.workflow.plan import number_in
from ortflow.workflow.record import ATTEMPTS, damage_words, set_aside
from ortflow.workflow.room import RECORDS, OutOfDisk, is_full
from ortflow.workflow.rundir import OWN_FILES, RunDir, write_atomically
from ortflow.workflow.spec.checks.batch import KEY
from ortflow.workflow.spec.file.dump import dump_run_file
from ortflow.workflow.spec.file.load import load_run_file
from ortflow.workflow.spec.file.paths import moved
from ortflow.workflow.spec.run import RunSpec

_PASSING = re.compile(rf"\.(launcher|ranks)\.lock|{owned.TEMPORARY}")
"""What stands in a directory that another launcher is about to take, or was when it was killed."""


@dataclass
class Opened:
    """A run directory that is ours; `lock` holds it."""

    run: RunDir
    spec: RunSpec
    lock: int
    notes: tuple[str, ...] = ()
    """What a person should know before it starts."""
    finished: bool = False
    """There is nothing left to do."""
    handed_over: bool = False
    """Another process holds the lock now and answers for the directory."""


@contextmanager
def opened(submission: Submission, check: Callable[[], None] | None = None) -> Iterator[Opened]:
    """Take the directory, and let go of it behind the block; `check` is called behind the lock, before any change.

    Raises UserError where it is in use, holds something else, or cannot be made. Where the block raises, or ends
    without an attempt or with one that refused its input, a directory that was made here is removed again.
    """
    run = submission.run
    _refuse_strangers(run)
    made = _make(run.root)
    lock = _lock(run)
    result = None
    try:
        if check is not None:
            check()
        if submission.fresh and not _empty(run):
            lock = _put_aside(run, lock)
        new = _empty(run)
        try:
            result = _settle(submission, lock, new)
            yield result
        finally:
            if new and _worthless(run) and not (result and result.handed_over):
                _remove(run.root, made)
    finally:
        os.close(lock)


def _settle(submission: Submission, lock: int, new: bool) -> Opened:
    run, spec = submission.run, submission.spec
    if new:
        agree(spec)
        write_atomically(run.run_file, dump_run_file(spec).encode())
        return Opened(run, spec, lock)
    if not run.run_file.exists():
        raise _not_a_run(run.root)
    before = moved(load_run_file(run.run_file), run.root)
    refuse(run.root, differences(before.model_dump(), spec.model_dump()))
    batch = begun_batch(run, before)
    spec = going_on(before, spec, batch)
    changes = differences(before.model_dump(), spec.model_dump())
    if state(run.read_attempts(), alive=False) is State.FINISHED and not any(
        within(change.key, LENGTHENS) for change in changes
    ):
        return Opened(run, before, lock, finished=True)
    write_atomically(run.run_file, dump_run_file(spec).encode())
    notes = [*batch_words(before, spec, batch), *(str(change) for change in changes if change.key != KEY)]
    if words := damage_words(run.attempts, set_aside(run.attempts, ATTEMPTS), aside=True):
        notes.append(words)
    if notes:
        told = [change._asdict() for change in changes]
        run.record_attempt(event="changed", attempt=next_attempt(run.read_attempts()), changes=told, notes=notes)
    return Opened(run, spec, lock, tuple(notes))


def begun_batch(run: RunDir, before: RunSpec) -> int:
    """Samples a step that the run has had so far: of its plan, which ranks have made, or else of its run file."""
    if before.train.global_batch is None:
        return number_in(run.plan, "global_batch") or before.global_batch
    return before.global_batch


def _make(root: Path) -> Path | None:
    """Make the folder; the topmost one that was not there, or None if all were."""
    topmost = None
    for folder in (root, *root.parents):
        if folder.exists():
            break
        topmost = folder
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
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
    """Raise UserError where the directory holds something and no run of ours; nothing is made there before."""
    if run.root.is_dir() and not run.is_ours and not all(map(_PASSING.fullmatch, os.listdir(run.root))):
        raise _not_a_run(run.root)


def _not_a_run(root: Path) -> UserError:
    return UserError(f"{root} is neither empty nor a run directory", where="run_dir", fix="choose another run_dir")


def _put_aside(run: RunDir, lock: int) -> int:
    """Rename the directory to the first free NAME.N, its run file with it, and take a new one."""
    number = 1
    while os.path.lexists(aside := run.root.with_name(f"{run.root.name}.{number}")):
        number += 1
    try:
        run.root.rename(aside)
    except OSError as error:
        raise UserError(
            f"{run.root} cannot be put aside: {error.strerror}", where="run_dir", fix="choose another run_dir"
        ) from error
    old = RunDir(aside)
    if old.run_file.exists():
        write_atomically(old.run_file, dump_run_file(moved(load_run_file(old.run_file), aside)).encode())
    run.root.mkdir()
    new = _lock(run)
    os.close(lock)
    return new


def _empty(run: RunDir) -> bool:
    """Whether nothing is lost if the directory is taken for another run."""
    names = os.listdir(run.root)
    return all(map(_PASSING.fullmatch, names)) or (run.run_file.name in names and _worthless(run))


def _worthless(run: RunDir) -> bool:
    """Whether nothing came of it: no attempt, or only one that refused its input before the first step."""
    attempts = [record for record in run.read_attempts() if record.get("event") in ("start", "end")]
    if attempts and (len(attempts) > 2 or attempts[-1].get("outcome") != "user_error"):
        return False
    return not any(record.get("event") == "step" for record in last_records(run.events(0)))


def _remove(root: Path, topmost: Path | None) -> None:
    """Remove what a run left that came to nothing: its own files, and the folders that were made for it."""
    owned.clear(root.resolve(), OWN_FILES)
    if topmost is None:
        return
    for folder in (root, *root.parents):
        if not folder.is_relative_to(topmost) or any(folder.iterdir()):
            return
        folder.rmdir()
