"""Reads the tensors of a checkpoint by name, whatever number of ranks saved it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ortflow.workflow.checkpoint.checkpoint_names import MANIFEST
from ortflow.workflow.checkpoint.load import load
from ortflow.workflow.checkpoint.manifest import Damaged, Manifest
from ortflow.workflow.checkpoint.store import DirectoryStore
from ortflow.workflow.checkpoint.verify import read_manifest
from ortflow.workflow.errors import UserError
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.spec.averages import BUFFER
from ortflow.workflow.spec.file.load import load_run_file
from ortflow.workflow.spec.file.paths import moved
from ortflow.workflow.weights.table import Array


def store_at(path: Path) -> tuple[DirectoryStore, int | None] | None:
    """The folder of checkpoints at a path, and the step that the path names; None if there is none.

    The path is a run directory, a folder of checkpoints or one of them. Raises UserError if the run file is invalid.
    """
    run = RunDir(path)
    if path.is_dir() and run.run_file.is_file():
        spec = moved(load_run_file(run.run_file, others=False), path)
        return DirectoryStore(path / spec.checkpoint.directory), None
    if (path / MANIFEST).is_file():
        store = DirectoryStore(path.parent)
        return store, next((step for step in store.steps() if store.place(step) == path), None)
    store = DirectoryStore(path)
    return (store, None) if path.is_dir() and store.steps() else None


def is_averaged(manifest: Manifest) -> bool:
    """Whether a checkpoint has averaged weights, which are the run's result."""
    return BUFFER in manifest.buffers


def read_checkpoint(store: DirectoryStore, step: int | None) -> tuple[Manifest, dict[str, Array]]:
    """The manifest and the tensors, fp32, of a step, or of the newest complete checkpoint if `step` is None.

    They are those that the run exports: averaged where the run averages them. The tensors are views of one array, and
    the optimizer's state is not kept. Raises UserError if there is no such checkpoint or if it is damaged.
    """
    steps = store.steps()
    existing = ", ".join(map(str, steps)) or "none"
    if step is not None and step not in steps:
        raise UserError(f"no checkpoint of step {step}", where=str(store.path), fix=f"choose of: {existing}")
    for candidate in reversed(steps) if step is None else [step]:
        try:
            manifest = read_manifest(store, candidate)
            flat = np.zeros(manifest.index.size, np.float32)
            average = np.zeros(manifest.buffers[BUFFER].count if is_averaged(manifest) else 0, np.float32)
            averages = {BUFFER: average} if is_averaged(manifest) else {}
            load(store, candidate, {"parameters": flat, **averages}, index=manifest.index, partial=True)
        except Damaged as fault:
            if step is not None:
                raise UserError(fault.reason, where=str(fault.path), fix="choose another step") from fault
            continue
        flat[: average.size] = average  # of the trained parameters, which are first in the index
        return manifest, {e.name: flat[e.offset : e.end].reshape(e.tensor.shape) for e in manifest.index}
    raise UserError(f"no complete checkpoint (existing steps: {existing})", where=str(store.path))
