"""The folder of a program's save, in which the program writes what it likes. Called by rank 0."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from ortflow.workflow.checkpoint.checkpoint_names import FILES, PROGRAM
from ortflow.workflow.checkpoint.store import CheckpointStore
from ortflow.workflow.run.rundir import sync_directory


def begin_program(store: CheckpointStore, step: int, attempt: int) -> Path:
    """Empty temporary folder of a program's save."""
    store.abandon(step, attempt)
    folder = store.begin(step, attempt)
    (folder / PROGRAM).touch()
    return folder


def files_written(folder: Path) -> list[str]:
    """The files that a program has written, as paths in the folder. Raises OSError for anything but a file."""
    paths = []
    for root, folders, files in os.walk(folder):
        for name in sorted((*folders, *files)):
            path = Path(root, name)
            if path.is_symlink() or not (path.is_dir() or path.is_file()):
                raise OSError(errno.EINVAL, "is not a file, and cannot be saved", str(path))
        paths += [Path(root, name).relative_to(folder).as_posix() for name in files]
    reserved = [name for name in paths if FILES.fullmatch(name) and not name.startswith("rank-")]
    if reserved:
        raise OSError(errno.EEXIST, "has a name that checkpoints use themselves", str(folder / reserved[0]))
    return sorted(name for name in paths if name != PROGRAM)


def seal_program(folder: Path) -> None:
    """Before the commit of a program's save: its folders are durable, and its mark is removed."""
    (folder / PROGRAM).unlink()
    for root, _, _ in os.walk(folder, topdown=False):
        sync_directory(Path(root))
