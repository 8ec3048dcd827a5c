"""What a folder is by the names in it. Called by the formats whose sets can be folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ortflow.workflow.errors import UserError


def files_of(places: Sequence[Path], *ends: str) -> list[Path]:
    """The files, and of folders those with one of these ends in the order of their names, without hidden ones."""
    return [file for place in places for file in _files_at(place, *ends)]


def _files_at(path: Path, *ends: str) -> list[Path]:
    return [file for file in _files(path) if file.name.lower().endswith(ends)] if path.is_dir() else [path]


def holds(folder: Path, *ends: str, exclusive: bool = False) -> bool:
    """Whether files with one of these ends are in a folder, and no Arrow file; with `exclusive`, no other file at all.

    A folder of Arrow files is a set of that format, whatever else is in it. Raises UserError if it cannot be read.
    """
    if not folder.is_dir():
        return False
    names = [file.name.lower() for file in _files(folder)]
    fitting = [name for name in names if name.endswith(ends)]
    return bool(fitting) and not any(name.endswith(".arrow") for name in names) and (not exclusive or fitting == names)


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(file for file in folder.iterdir() if not file.name.startswith(".") and file.is_file())
    except OSError as error:
        raise UserError(error.strerror or str(error), where=str(folder), fix="change its permissions") from None
