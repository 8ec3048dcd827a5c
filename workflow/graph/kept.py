"""Whether the graphs that an earlier attempt left are still what it wrote.

Called by step `configure`; reads and never writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import xxhash

CHUNK = 8 << 20


def hashes_of(folder: Path) -> dict[str, str]:
    """Hash of each file that configure writes there, by name; hidden ones are left out."""
    return {
        path.name: _hash(path)
        for path in sorted(folder.iterdir())
        if path.suffix in (".onnx", ".json", ".safetensors") and not path.name.startswith(".") and path.is_file()
    }


def damage(folder: Path, hashes: Mapping[str, str]) -> str | None:
    """Which file is not what was written, and how; None where all are."""
    if not hashes:
        return f"there is no record of what lies in {folder}"
    for name, expected in hashes.items():
        try:
            if _hash(folder / name) != expected:
                return f"{folder / name} is damaged"
        except FileNotFoundError:
            return f"{folder / name} is missing"
        except OSError as error:
            return f"{folder / name} cannot be read ({error.strerror})"
    return None


def _hash(path: Path) -> str:
    state = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK):
            state.update(chunk)
    return state.hexdigest()
