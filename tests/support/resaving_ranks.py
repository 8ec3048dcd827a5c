"""Ranks that load a checkpoint into the trainer of a run, and save what the trainer then holds: a program for tests.

mpirun -n RANKS python resaving_ranks.py RUN_FILE FOLDER CHECKPOINTS STEP OUTPUT    # FOLDER: for plan and graphs
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from ortflow.workflow.checkpoint.commit import commit
from ortflow.workflow.checkpoint.load import load, window_for
from ortflow.workflow.checkpoint.store import DirectoryStore
from ortflow.workflow.checkpoint.writer import Writer, specs
from ortflow.workflow.comm.mpi import MpiCommunicator
from ortflow.workflow.device.cpu import CpuDevice
from ortflow.workflow.rundir import RunDir
from ortflow.workflow.spec.file.load import load_run_file
from ortflow.workflow.spec.file.paths import resolve_paths
from ortflow.workflow.steps.configure import prepare
from ortflow.workflow.trainer import Report
from ortflow.workflow.trainer.divided import DividedTrainer
from ortflow.workflow.trainers import builder_of


def main() -> None:
    """The program of each rank."""
    run_file, folder, source, step, output = (Path(word) for word in sys.argv[1:])
    spec = resolve_paths(load_run_file(run_file, (), files=True), run_file)
    world, run_dir = MpiCommunicator(), RunDir(folder)
    builder = builder_of(spec, run_dir, Report())
    if world.rank == 0:
        prepare(builder, run_dir, spec, Report())
    world.barrier()
    trainer = builder.open(world, CpuDevice(), 1, [builder.check_machine()])
    buffers = trainer.state()
    windows = {name: window_for(buffer) for name, buffer in buffers.items()}
    loaded = load(DirectoryStore(source), int(step.name), windows, index=trainer.index)
    trainer.after_load()
    if isinstance(trainer, DividedTrainer):
        # What is saved must come from what the ranks hold of the divided model, not from these copies.
        for buffer in buffers.values():
            buffer.part.fill(np.nan)  # type: ignore[union-attr]
    trainer.before_save()
    store = DirectoryStore(output)
    writer = Writer(store, buffers, rank=world.rank, world_size=world.world_size, attempt=0)
    writer.start(int(step.name), urgent=True)
    records = world.gather(writer.wait().record)
    if records is not None:
        manifest = loaded.manifest
        commit(
            store, manifest.step, 0, records, buffers=specs(buffers), index=manifest.index,
            progress=manifest.progress, environment=manifest.environment,
        )  # fmt: skip
    print("good", flush=True)
    world.close()


if __name__ == "__main__":
    main()
