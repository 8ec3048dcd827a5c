"""The run as its pods see it: the run file of the ConfigMap, with paths on the volume. Used by the supervisor
process."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from ortflow.launchers.kubernetes.pod import Pod
from ortflow.launchers.remote.bootstrap import place_files
from ortflow.workflow.errors import UserError
from ortflow.workflow.spec.file.load import load_run_file
from ortflow.workflow.spec.file.paths import resolve_paths
from ortflow.workflow.spec.run import RunSpec
from ortflow.workflow.system.disk_space import is_full, out_of_disk


def read_spec(pod: Pod) -> tuple[RunSpec, Path]:
    """The run with paths on the volume, and its folder there. Raises Faults."""
    spec = load_run_file(pod.run_file)
    folder = Path(spec.backends.kubernetes.folder or pod.mount / "files" / spec.name)
    return resolve_paths(spec, folder / "run.yaml", cwd=pod.mount), folder


def unpack(pod: Pod, folder: Path) -> None:
    """Copy the files that came with the run file to its folder. Raises UserError if it cannot be written, OutOfDisk
    if it is full.

    Other files with the same names are kept under new names.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if pod.carried.is_dir():
            with tempfile.TemporaryDirectory(dir=folder, prefix=".incoming-") as box:
                new = Path(box) / "new"
                place_files(str(new), str(folder), _copied(pod.carried, new))
    except OSError as error:
        if is_full(error):
            raise out_of_disk(error, default=folder) from error
        raise UserError(
            f"{folder} cannot be written by uid {os.getuid()}: {error}",
            where="backends.kubernetes.volume",
            fix="set backends.kubernetes.security to the owner of the volume, or open the volume for this uid",
        ) from error


def _copied(carried: Path, new: Path) -> list[str]:
    """Copy what the ConfigMap carries; returns the files. Only their bytes: some volumes have no modes and times."""
    files: list[str] = []
    for path in sorted(carried.rglob("*")):
        relative = path.relative_to(carried)
        # A ConfigMap volume is a tree of links to a folder, ..data, that is replaced as a whole.
        if path.is_file() and not any(part.startswith("..") for part in relative.parts):
            target = new / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
            files.append(relative.as_posix())
    new.mkdir(exist_ok=True)
    return files
