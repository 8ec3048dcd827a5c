"""Step 7: the inference model with trained weights, checked against the evaluation graph on real samples.

In a run, rank 0 does it behind the last step; offline, from any whole checkpoint, `export_checkpoint` does the same
with one rank and no MPI.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ortflow.workflow.checkpoint.load import Loaded, load, load_newest
from ortflow.workflow.checkpoint.manifest import Damaged
from ortflow.workflow.checkpoint.store import DirectoryStore
from ortflow.workflow.comm.solo import SoloCommunicator
from ortflow.workflow.device.cpu import CpuDevice
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.types import GraphSet
from ortflow.workflow.layout import FlatIndex
from ortflow.workflow.plan import Plan
from ortflow.workflow.progress import Progress
from ortflow.workflow.ranks import Place
from ortflow.workflow.rundir import RunDir
from ortflow.workflow.spec.load import load_run_file
from ortflow.workflow.steps.context import Context
from ortflow.workflow.steps.shard import Stream
from ortflow.workflow.trainer import MicroBatch
from ortflow.workflow.trainer.graph import GraphTrainer
from ortflow.workflow.trainer.sessions import Sessions

CHECKED_BATCHES = 2


@dataclass(frozen=True)
class Exported:
    """An inference model made offline."""

    path: Path
    step: int
    max_difference: float | None
    """To the evaluation graph on real samples; None where the data is not there to compare on."""


def export(context: Context) -> None:
    """Write and check the model; only rank 0, whose parameters are everybody's."""
    if not context.spec.export.enabled:
        return
    if context.leads:
        path = context.run_dir.root / context.spec.export.path
        difference = context.trainer.export(path, samples(context), context.spec.export.tolerance)
        context.events.write("export", path=str(path), max_difference=difference)
        print(f"exported {path}, at most {difference:.2g} off the evaluation graph", flush=True)
    context.world.barrier()


def samples(context: Context) -> list[MicroBatch]:
    """A few real micro-batches, of the evaluation set where there is one."""
    return list(islice(context.stream.samples(), CHECKED_BATCHES))


def export_checkpoint(run_dir: RunDir, step: int | None, path: Path | None) -> Exported:
    """The inference model of a checkpoint, the newest whole one if no step is given; one process, no MPI.

    Raises UserError where the run has no such checkpoint, OrtflowError where the model is off by more than the run
    file's tolerance.
    """
    spec = load_run_file(run_dir.run_file)
    graphs, plan = GraphSet.load(run_dir.graphs), Plan.load(run_dir.plan)
    sessions = Sessions(CpuDevice(), os.cpu_count() or 1, spec.monitor.runtime_log)
    trainer = GraphTrainer(graphs, spec, sessions, SoloCommunicator())
    targets = {name: np.empty(buffer.count, buffer.dtype) for name, buffer in trainer.state().items()}
    loaded = find(DirectoryStore(run_dir.root / spec.checkpoint.directory), step, targets, trainer.index)
    for name, buffer in trainer.state().items():
        buffer.write(targets[name])
    path = path or run_dir.root / spec.export.path
    batches: list[MicroBatch] = []
    if Path((spec.data.eval or spec.data.train).path).exists():
        alone = Place(0, 1, 0, 1, "none", "")
        stream = Stream(spec, plan, graphs, alone, Progress())
        batches = list(islice(stream.samples(), CHECKED_BATCHES))
        stream.close()
    difference = trainer.export(path, batches, spec.export.tolerance)
    return Exported(path, loaded.manifest.step, difference if batches else None)


def find(store: DirectoryStore, step: int | None, targets: Mapping[str, npt.NDArray[Any]], index: FlatIndex) -> Loaded:
    """A whole checkpoint, of `step` or the newest; raises UserError where there is none."""
    known = ", ".join(map(str, store.steps())) or "none"
    if step is None:
        loaded = load_newest(store, targets, index=index)
        if loaded is None:
            raise UserError(f"no whole checkpoint (steps there: {known})", where=str(store.path))
        return loaded
    if step not in store.steps():
        raise UserError(f"no checkpoint of step {step}", where=str(store.path), fix=f"choose of: {known}")
    try:
        return load(store, step, targets, index=index)
    except Damaged as fault:
        raise UserError(fault.reason, where=str(fault.path), fix="choose another step") from fault
