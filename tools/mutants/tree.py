"""A copy of the tree in which `ortflow` is imported from the copy, not from where it is installed.

The top-level folders workflow/, launchers/ and manifests/ are packages below `ortflow`. Links of those names in the
copy's ortflow/ make it importable as it is, and a folder of PYTHONPATH comes before an editable installation, in
subprocesses too.
"""

from __future__ import annotations

import compileall
import os
import py_compile
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("workflow", "launchers", "manifests")


@dataclass(frozen=True)
class Tree:
    """A copy of the tracked and new files of a working tree."""

    folder: Path

    def environment(self) -> dict[str, str]:
        """The variables with which Python imports `ortflow` from this copy."""
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPYCACHEPREFIX"}
        return {**environment, "PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1"}

    def remove(self) -> None:
        """Delete the copy."""
        shutil.rmtree(self.folder, ignore_errors=True)


def copy_tree(root: Path, folder: Path) -> Tree:
    """Copy the files that git would commit; the bytecode is checked by the source's hash, whatever its time."""
    shutil.rmtree(folder, ignore_errors=True)
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (root / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / name)
    for name in PACKAGES:
        (folder / "ortflow" / name).symlink_to(f"../{name}", target_is_directory=True)
    for name in ("ortflow", *PACKAGES):
        compileall.compile_dir(folder / name, quiet=1, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
    return Tree(folder)
