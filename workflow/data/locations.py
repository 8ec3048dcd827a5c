"""The files and folders that a set's paths name: patterns are expanded, URLs fetched. Called when a set is opened."""

from __future__ import annotations

import glob
import os
from pathlib import Path

from ortflow.workflow.errors import UserError
from ortflow.workflow.spec.data import DataSet
from ortflow.workflow.spec.locations import url_of


def places_of(section: DataSet) -> list[Path]:
    """Files and folders, in the order of the list; those of a pattern in the order of their names.

    Raises UserError for a pattern without a file, and for a file that is named twice, also as one of a folder: its
    samples would count twice.
    """
    places = [place for text in section.paths for place in _expanded(text)]
    real_paths: set[str] = set()
    for place in places:
        real = os.path.realpath(place)
        if real in real_paths:
            raise UserError("is named twice", where=str(place), fix="name each file of the set once")
        real_paths.add(real)
    for place in places:
        folder = os.path.dirname(os.path.realpath(place))
        if folder in real_paths and not place.is_dir():
            fix = "name the folder or its files; the pattern **/*.EXT names no folder"
            raise UserError(f"is in {folder}, which is named, too", where=str(place), fix=fix)
    return places


def are_there(section: DataSet) -> bool:
    """Whether all files and folders of a set exist."""
    try:
        return all(place.exists() for place in places_of(section))
    except UserError:
        return False


def _expanded(text: str) -> list[Path]:
    # The name of a file may have the characters of a URL or of a pattern: what exists is that file.
    if not os.path.lexists(text) and (url := url_of(text)) is not None:
        from ortflow.workflow.data.remote import fetched

        return list(fetched(url))
    if os.path.lexists(text) or not glob.has_magic(text):
        return [Path(text)]
    names = sorted(glob.glob(text, recursive=True))
    if not names:
        raise UserError("no file has such a name", where=text, fix="correct the pattern")
    return [Path(name) for name in names]
