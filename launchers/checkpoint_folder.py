"""A folder of checkpoints outside the run directory, when a run begins: it must not contain those of another run.

Used by `run_directory_lock` before it changes anything. A launcher may be unable to see the folder; rank 0 checks it
again (`workflow/steps/identity.py`).
"""

from __future__ import annotations

from pathlib import Path

from ortflow.workflow.checkpoint.store import DirectoryStore
from ortflow.workflow.errors import UserError
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.spec.file.load import load_run_file
from ortflow.workflow.spec.file.paths import moved
from ortflow.workflow.spec.run import RunSpec
from ortflow.workflow.steps.identity import ELSEWHERE, is_outside, recorded_identity, refuse_other_runs
from ortflow.workflow.system.files import free_name


def outside_folder(run: RunDir, spec: RunSpec) -> Path | None:
    """The folder of a run's checkpoints if it is outside the run directory, and this machine is to look at it."""
    if spec.run_dir is None:  # run directory and folder are on volumes of pods
        return None
    folder = run.root / spec.checkpoint.directory
    return folder if is_outside(folder, run.root) else None


def refuse_filled(run: RunDir, spec: RunSpec) -> None:
    """Raise UserError if the folder outside the run directory of a run that begins has checkpoints."""
    folder = outside_folder(run, spec)
    if folder is not None and (step := _newest(folder)) is not None:
        raise UserError(
            f"{folder} already has checkpoints, the newest of step {step}, and this run begins",
            where="checkpoint.directory", fix=ELSEWHERE,
        )  # fmt: skip


def folder_to_put_aside(run: RunDir, spec: RunSpec) -> Path | None:
    """The folder outside the run directory that a run leaves when another one begins in its place (`--fresh`).

    None if there is none, or if the new run uses another folder. Raises UserError if it has checkpoints of a third run.
    """
    folder = outside_folder(run, spec)
    if folder is None or _newest(folder) is None:
        return None
    before = moved(load_run_file(run.run_file), run.root) if run.run_file.exists() else None
    identity = None if before is None else recorded_identity(run, before)
    if before is None or identity is None or outside_folder(run, before) != folder:
        refuse_filled(run, spec)
    else:
        refuse_other_runs(DirectoryStore(folder), identity, ELSEWHERE)
    return folder


def put_aside(folder: Path) -> Path:
    """Rename a folder of checkpoints to the first free NAME.N, and return the new path. Raises UserError."""
    aside = free_name(folder)
    try:
        folder.rename(aside)
    except OSError as error:
        raise UserError(
            f"{folder} has the checkpoints of the old run, and cannot be renamed: {error.strerror}",
            where="checkpoint.directory", fix="give the new run another folder",
        ) from error  # fmt: skip
    return aside


def _newest(folder: Path) -> int | None:
    try:
        return max(DirectoryStore(folder).steps(), default=None)
    except OSError:  # rank 0 may be able to read it
        return None
