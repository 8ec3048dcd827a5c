"""Checks whether the graphs of an earlier attempt are unchanged.

Called by step `configure`; reads only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import xxhash

from ortflow.workflow.system.files import open_regular

CHUNK = 8 << 20
_HASH = re.compile(r"\d{1,18}:[0-9a-f]+")


def hashes_of(folder: Path) -> dict[str, str]:
    """Size and hash of each file that configure writes to the folder, by its path in it; hidden files are omitted."""
    return {
        path.relative_to(folder).as_posix(): hash_of(path)
        for path in sorted(folder.rglob("*"))
        if path.suffix in (".onnx", ".json", ".safetensors") and not path.name.startswith(".") and path.is_file()
    }


def damage(folder: Path, hashes: Mapping[str, str]) -> str | None:
    """Describe the first file that differs from the record; None if all are unchanged."""
    if not hashes or not all(_HASH.fullmatch(entry) for entry in hashes.values()):
        return f"there is not a valid record of the files in {folder}"
    for name, expected in hashes.items():
        try:
            # Check the size first: reading a sparse file could take hours.
            size, _, _ = expected.rpartition(":")
            if (folder / name).stat().st_size != int(size or -1) or hash_of(folder / name) != expected:
                return f"{folder / name} is damaged"
        except FileNotFoundError:
            return f"{folder / name} is missing"
        except OSError as error:
            return f"{folder / name} cannot be read ({error.strerror})"
    return None


def hash_of(path: Path) -> str:
    """Size and hash of a file. Raises OSError."""
    state = xxhash.xxh3_128()
    with os.fdopen(open_regular(path), "rb", buffering=0) as file:
        while chunk := file.read(CHUNK):
            state.update(chunk)
        return f"{os.fstat(file.fileno()).st_size}:{state.hexdigest()}"
