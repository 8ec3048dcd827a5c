"""Which files are a checkpoint's, and the deletion of those alone. Called by the store."""

from __future__ import annotations

import contextlib
import re
import shutil
from pathlib import Path

from ortflow.workflow.checkpoint.checkpoint_names import FILES, MANIFEST, PROGRAM
from ortflow.workflow.checkpoint.manifest import format_of
from ortflow.workflow.checkpoint.program import FORMAT, decode_program
from ortflow.workflow.errors import UserError
from ortflow.workflow.system import own_files
from ortflow.workflow.system.files import read_whole


def is_own_checkpoint(path: Path) -> bool:
    """Whether a path is a real folder that contains only a checkpoint's files."""
    return own_files.is_folder(path) and not any(own_files.foreign_files(path, _names_in(path)))


def delete(path: Path) -> bool:
    """Delete a checkpoint's files and its folder; returns whether the folder was deleted."""
    with contextlib.suppress(OSError):
        if own_files.is_folder(path) and (path / PROGRAM).is_file():
            # The mark, which allows it, is the last.
            for entry in path.iterdir():
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                elif entry.name != PROGRAM:
                    entry.unlink()
            (path / PROGRAM).unlink()
            path.rmdir()
            return True
        names = _names_in(path)
        if names is not FILES:
            # The manifest, which names the others, is the last.
            own_files.clear(path, re.compile(f"(?!{re.escape(MANIFEST)}$)(?:{names.pattern})"))
        return own_files.remove(path, names)
    return False


def _names_in(path: Path) -> re.Pattern[str]:
    """The names of a checkpoint's files: of a program's, those that its manifest has."""
    try:
        data = read_whole(path / MANIFEST, 256 << 20)
        if format_of(data) != FORMAT:
            return FILES
        names = [re.escape(file.name) for file in decode_program(data).files]
    except (OSError, ValueError):
        return FILES
    return re.compile("|".join((FILES.pattern, *names)))


def not_own(path: Path) -> UserError:
    """The refusal to delete a folder that is not a checkpoint's alone."""
    return UserError(
        "is not deleted, because it contains other files than a checkpoint's",
        where=str(path),
        fix="remove it yourself",
    )
