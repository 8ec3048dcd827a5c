"""Which files are tables, by their names. Pure but for listing folders; imports nothing that is slow."""

from __future__ import annotations

import glob
import os
from pathlib import Path

JSON_LINES = (".jsonl", ".ndjson")
CSV = (".csv", ".tsv", ".tab")
TEXT = (*CSV, *JSON_LINES)


def is_table(path: Path) -> bool:
    """Whether a file, a folder or a glob pattern names tables, by the ends of their names."""
    files = files_of(path)
    return bool(files) and all(file.suffix.lower() in TEXT for file in files)


def files_of(path: Path) -> list[Path]:
    """The files of a path, a folder or a pattern, in the order of their names."""
    if path.is_dir():
        if any(path.glob("*.arrow")):
            return []
        return sorted(file for file in path.iterdir() if file.is_file() and file.suffix.lower() in TEXT)
    if not os.path.lexists(path) and glob.has_magic(str(path)):
        return sorted(Path(name) for name in glob.glob(str(path), recursive=True))
    return [path]
