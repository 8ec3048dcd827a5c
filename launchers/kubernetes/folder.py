"""The run as its pods see it: the run file of the ConfigMap, with paths on the volume. Used by the keeper."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from ortflow.launchers.kubernetes.pod import Pod
from ortflow.launchers.remote.bootstrap import bring
from ortflow.workflow.errors import UserError
from ortflow.workflow.spec.load import load_run_file
from ortflow.workflow.spec.paths import resolve_paths
from ortflow.workflow.spec.run import RunSpec


def read_spec(pod: Pod) -> tuple[RunSpec, Path]:
    """The run, its paths seen from its folder on the volume, and that folder; raises Faults."""
    spec = load_run_file(pod.run_file)
    folder = Path(spec.backends.kubernetes.folder or pod.mount / "files" / spec.name)
    return resolve_paths(spec, folder / "run.yaml", cwd=pod.mount), folder


def unpack(pod: Pod, folder: Path) -> None:
    """Put the files that came with the run file into its folder; raises UserError where it cannot be written.

    Files of the same names that somebody else has put there are kept under other names.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if pod.carried.is_dir():
            with tempfile.TemporaryDirectory(dir=folder, prefix=".incoming-") as box:
                new = Path(box) / "new"
                # The ConfigMap is a tree of links to a folder that is replaced as a whole.
                shutil.copytree(pod.carried, new, ignore=shutil.ignore_patterns("..*"))
                files = [path.relative_to(new).as_posix() for path in new.rglob("*") if path.is_file()]
                bring(str(new), str(folder), files)
    except (OSError, shutil.Error) as error:
        raise UserError(
            f"{folder} cannot be written by uid {os.getuid()}: {error}",
            where="backends.kubernetes.volume",
            fix="set backends.kubernetes.security to the owner of the volume, or open the volume for this uid",
        ) from error
