"""Which run this is, and whether its folder of checkpoints is its own.

Step `configure` determines the identity when a run begins; step `runtime` checks the folder before anything in it is
read or removed. The launcher has checked it before, where it can see the folder (`launchers/checkpoint_folder.py`).
"""

from __future__ import annotations

import os
from pathlib import Path

import xxhash

from ortflow.workflow.checkpoint import folder_lock
from ortflow.workflow.checkpoint.identity import Identity, difference
from ortflow.workflow.checkpoint.manifest import Damaged
from ortflow.workflow.checkpoint.store import DirectoryStore
from ortflow.workflow.checkpoint.verify import read_folder
from ortflow.workflow.errors import UserError
from ortflow.workflow.run.graph_hashes import hash_of
from ortflow.workflow.run.record import ATTEMPTS, parse
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.spec.run import RunSpec
from ortflow.workflow.steps.run_plan import Plan
from ortflow.workflow.system.files import lines_of

ELSEWHERE = "give this run a folder of its own (checkpoint.directory), or move these checkpoints elsewhere"
COPIED = "move it elsewhere; to continue a copy of a run, copy its whole run directory"


def identity_of(run_dir: RunDir, spec: RunSpec, data: str, before: Plan | None) -> Identity:
    """The identity of a run: from its previous plan, else from its first record and its inputs.

    The record, and not a random number, so that a run whose plan is lost keeps its identity.
    """
    identity = None if before is None else Identity.from_json(before.run)
    if identity is not None:
        return identity
    line = _first_record(run_dir)
    record = (parse(line, ATTEMPTS) if line else None) or {}
    return Identity(
        id=xxhash.xxh3_128_hexdigest(line or os.urandom(16)),
        name=spec.name,
        submitted=str(record.get("time", "")),
        seed=str(spec.seed),
        model=_model(run_dir, spec),
        data=data,
    )


def _model(run_dir: RunDir, spec: RunSpec) -> str:
    """Hash of the model's file, and of the weights that the run starts with."""
    if spec.model is None or not os.path.isfile(spec.model.path):
        return ""
    started = None
    if spec.model.start_from is not None:
        from ortflow.workflow.weights.kept import read_record  # imports numpy, which commands do without

        started = read_record(run_dir.graphs)
    return hash_of(Path(spec.model.path)) + (f"+{started.digest}" if started is not None else "")


def recorded_identity(run_dir: RunDir, spec: RunSpec) -> Identity | None:
    """The identity of a run whose ranks have run, for a reader; None if its plan has none."""
    try:
        return Identity.from_json(Plan.load(run_dir.plan).run)
    except (OSError, ValueError):
        return identity_of(run_dir, spec, "", None) if _first_record(run_dir) else None


def is_outside(folder: Path, root: Path) -> bool:
    """Whether a folder of checkpoints is outside the run directory `root`, after links are resolved."""
    return not folder.resolve().is_relative_to(root.resolve())


def take_folder(store: DirectoryStore, run_dir: RunDir, run: Identity | None) -> int | None:
    """Check that a run may use a folder of checkpoints, and lock it if it is outside the run directory. Rank 0.

    Returns the lock's descriptor, if there is one. Raises UserError if another run uses the folder, or if it contains a
    checkpoint of another run; nothing in it is changed.
    """
    outside = is_outside(store.path, run_dir.root)
    if run is not None:
        refuse_other_runs(store, run, ELSEWHERE if outside else COPIED)
    return folder_lock.hold(store.path, run_dir.root, run.id if run else "") if outside else None


def refuse_other_runs(store: DirectoryStore, run: Identity, fix: str) -> None:
    """Raise UserError if a readable checkpoint of the folder is another run's."""
    for step, folder in store.folders():
        try:
            reason = difference(read_folder(folder, step), run)
        except Damaged:
            continue
        if reason is not None:
            raise UserError(reason, where=str(folder), fix=fix)


def _first_record(run_dir: RunDir) -> bytes | None:
    try:
        return next(lines_of(run_dir.attempts), None)
    except OSError:
        return None
