"""Which files are tables, by their names. Lists folders and reads schemas; imports nothing that is slow."""

from __future__ import annotations

import glob
import json
import os
from pathlib import Path

import pyarrow as pa

from ortflow.workflow.data.schema import UnusableError, column_of
from ortflow.workflow.errors import UserError
from ortflow.workflow.system.files import read_whole

JSON_LINES = (".jsonl", ".ndjson")
CSV = (".csv", ".tsv", ".tab")
TEXT = (*CSV, *JSON_LINES)
PARQUET = (".parquet", ".pq")
ARROW = (".feather", ".arrow")
FORMATS = (*TEXT, *PARQUET, *ARROW)
_HUGGING_FACE = "state.json"
_SPLITS = "dataset_dict.json"


def is_table(path: Path) -> bool:
    """Whether a file, a folder or a glob pattern names tables, by the ends of their names.

    Arrow files with plain numbers alone are none: they are mapped as they are.
    """
    if (path / _HUGGING_FACE).is_file() or (path / _SPLITS).is_file():
        return True
    if path.is_dir() and not _holds_tables(path):
        return False
    files = files_of(path)
    ends = {file.suffix.lower() for file in files}
    if not files or not ends <= {*FORMATS}:
        return False
    return ends != {".arrow"} or not _is_numbers(files[0])


def files_of(path: Path) -> list[Path]:
    """The files of a path, a folder or a pattern, in the order of their names.

    Raises UserError for a folder with several Hugging Face datasets, or one whose rows are chosen by an index.
    """
    if (path / _SPLITS).is_file():
        names = ", ".join(entry.name for entry in sorted(path.iterdir()) if (entry / _HUGGING_FACE).is_file())
        raise UserError("holds several datasets", where=str(path), fix=f"add the name of one to the path: {names}")
    if (path / _HUGGING_FACE).is_file():
        return _of_hugging_face(path)
    if path.is_dir():
        files = [file for file in path.iterdir() if file.is_file() and not file.name.startswith(".")]
        return sorted(file for file in files if file.suffix.lower() in FORMATS)
    if not os.path.lexists(path) and glob.has_magic(str(path)):
        return sorted(Path(name) for name in glob.glob(str(path), recursive=True))
    return [path]


def _holds_tables(folder: Path) -> bool:
    """Whether a folder has nothing but tables: a table beside images describes them."""
    visible = [entry for entry in folder.iterdir() if not entry.name.startswith((".", "_"))]
    return bool(visible) and all(entry.is_file() and entry.suffix.lower() in FORMATS for entry in visible)


def _of_hugging_face(path: Path) -> list[Path]:
    try:
        state = json.loads(read_whole(path / _HUGGING_FACE))
        names = [entry["filename"] for entry in state["_data_files"]]
        index_files = state.get("_indices_data_files")
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        raise UserError("is not the state of a Hugging Face dataset", where=str(path / _HUGGING_FACE)) from None
    if index_files:
        fix = "save it again behind `dataset.flatten_indices()`"
        raise UserError("is a selection of a dataset's rows", where=str(path), fix=fix)
    return [path / name for name in names]


def _is_numbers(path: Path) -> bool:
    """Whether an Arrow file has plain numbers alone. A damaged one counts as such: opening it reports the damage."""
    if not path.is_file():  # a pipe or a socket would block
        return True
    try:
        with pa.memory_map(str(path)) as mapped:
            schema = pa.ipc.open_file(mapped).schema
        for field in schema:
            column_of(field)
    except UnusableError:
        return False
    except (pa.ArrowException, OSError, ValueError):
        return True
    return True
