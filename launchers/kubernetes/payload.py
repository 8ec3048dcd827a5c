"""What a submission carries: the run file as written, and the small files beside it.

Kept in the record directory as the pods see them, so that a run can be resumed when its original folder is gone; a
run that was submitted elsewhere has them in its ConfigMap.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ortflow.launchers.base import Submission
from ortflow.launchers.kubernetes.api import Object
from ortflow.workflow.errors import Faults, UserError
from ortflow.workflow.run.rundir import RunDir, write_atomically
from ortflow.workflow.spec.file.load import read_run_file
from ortflow.workflow.spec.run import RunSpec

FOLDER = "kubernetes"
"""In the record directory: run.yaml and files/, laid out as in the pods."""
FILES = "backends.kubernetes.files"


@dataclass(frozen=True)
class Payload:
    """A run as sent."""

    source: Mapping[str, Any]
    spec: RunSpec
    contents: Mapping[str, str]
    """The files, by path beside the run file."""


def payload_of(submission: Submission) -> Payload:
    """What to send; for a resumed run, what was sent before."""
    if submission.source is not None and submission.folder is not None:
        contents = read_files(submission.spec.backends.kubernetes.files, submission.folder)
        return Payload(submission.source, submission.spec, contents)
    return kept(submission.run, submission.overrides)


def kept(run: RunDir, overrides: Sequence[str] = ()) -> Payload:
    """What was sent before according to the record directory, with new values. Raises UserError if there is none."""
    file = run.root / FOLDER / "run.yaml"
    if not file.is_file():
        raise UserError(
            f"{run.root} does not contain what was submitted",
            fix="submit the run file again: it continues the run",
        )
    reading = read_run_file(file, overrides, files=False)
    if reading.spec is None or reading.faults:
        raise Faults(reading.faults)
    contents = read_files(reading.spec.backends.kubernetes.files, file.parent / "files")
    return Payload(reading.written, reading.spec, contents)


def keep(run: RunDir, config_map: Object, spec: RunSpec | None = None) -> None:
    """Lay out what a ConfigMap carries; `spec` is the run in it, if already known."""
    folder, data = run.root / FOLDER, config_map.get("data") or {}
    text = str(data["run.yaml"])
    write_atomically(folder / "run.yaml", text.encode())
    spec = spec or read_run_file(folder / "run.yaml", files=False).spec
    if spec is not None and spec.train is not None and spec.train.steps is not None:
        # If the run file gives steps, the length of the run is known before the pods plan it.
        write_atomically(run.plan, json.dumps({"total_steps": spec.train.steps}).encode())
    for place, path in enumerate(spec.backends.kubernetes.files if spec is not None else ()):
        if (carried := data.get(f"file-{place}")) is not None:
            write_atomically(folder / "files" / path, str(carried).encode())


def read_files(paths: list[str], folder: Path) -> dict[str, str]:
    """Return the text of each small file. Raises UserError for one that cannot be carried."""
    contents = {}
    for path in paths:
        try:
            contents[path] = (folder / path).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{path} is not text", where=FILES, fix="put it on the volume") from error
        except OSError as error:
            raise UserError(
                f"{folder / path} cannot be read: {error.strerror}", where=FILES, fix="correct the path"
            ) from error
    return contents
