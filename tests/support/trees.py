"""The contents of a folder, for tests that nothing in it has changed."""

from __future__ import annotations

import os
from pathlib import Path


def tree(folder: Path) -> dict[str, str]:
    """Every name below a folder: the contents of a file, the target of a link."""
    found = {}
    for root, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(root, name)
            if path.is_symlink():
                found[str(path.relative_to(folder))] = f"-> {os.readlink(path)}"
            else:
                found[str(path.relative_to(folder))] = "folder" if path.is_dir() else path.read_bytes().hex()
    return found
