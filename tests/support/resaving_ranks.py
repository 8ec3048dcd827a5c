"""Ranks that load a checkpoint into the trainer of a run, and save what the trainer then holds: a program for tests.

mpirun -n RANKS python resaving_ranks.py STEP JOBS    # what JOBS contains is in `Job`; each takes the first ranks

Each rank prints `good`.
"""

from __future__ import annotations

import gc
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from ortflow.workflow.checkpoint.commit import commit
from ortflow.workflow.checkpoint.load import load, window_for
from ortflow.workflow.checkpoint.store import DirectoryStore
from ortflow.workflow.checkpoint.writer import Writer, specs
from ortflow.workflow.comm import Communicator
from ortflow.workflow.comm.mpi import MpiCommunicator
from ortflow.workflow.comm.solo import SoloCommunicator
from ortflow.workflow.device.cpu import CpuDevice
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.spec.file.load import load_run_file
from ortflow.workflow.spec.file.paths import resolve_paths
from ortflow.workflow.steps.configure import prepare
from ortflow.workflow.steps.trainers import builder_of
from ortflow.workflow.trainer import Report


@dataclass(frozen=True)
class Job:
    """A checkpoint to load and save again. All are paths but the number of ranks."""

    ranks: int
    run_file: str
    folder: str
    """For plan and graphs."""
    source: str
    output: str


def write_jobs(path: Path, jobs: list[Job]) -> Path:
    """A file for this program."""
    path.write_text(json.dumps([asdict(job) for job in jobs]))
    return path


def main() -> None:
    """The program of each rank."""
    everyone, step = MpiCommunicator(), int(sys.argv[1])
    for job in [Job(**content) for content in json.loads(Path(sys.argv[2]).read_text())]:
        if everyone.rank < job.ranks:
            resave(job, step, everyone.subset(range(job.ranks)) if job.ranks > 1 else SoloCommunicator())
            gc.collect()  # sessions end before the ranks of the next job meet
    print("good", flush=True)
    everyone.close()


def resave(job: Job, step: int, world: Communicator) -> None:
    """Do a job with its ranks."""
    run_file, run_dir = Path(job.run_file), RunDir(Path(job.folder))
    spec = resolve_paths(load_run_file(run_file, (), files=True), run_file)
    builder = builder_of(spec, run_dir, Report())
    if world.rank == 0:
        prepare(builder, run_dir, spec, Report())
    world.barrier()
    trainer = builder.open(world, CpuDevice(), 1, [builder.check_machine()])
    buffers = trainer.state()
    windows = {name: window_for(buffer) for name, buffer in buffers.items()}
    loaded = load(DirectoryStore(Path(job.source)), step, windows, index=trainer.index)
    trainer.after_load()
    if spec.divides:
        # What is saved must come from what the ranks hold of the divided model, not from these copies.
        for buffer in buffers.values():
            buffer.part.fill(np.nan)  # type: ignore[union-attr]
    trainer.before_save()
    store = DirectoryStore(Path(job.output))
    writer = Writer(store, buffers, rank=world.rank, world_size=world.world_size, attempt=0)
    writer.start(step, urgent=True)
    records = world.gather(writer.wait().record)
    if records is not None:
        manifest = loaded.manifest
        commit(
            store, manifest.step, 0, records, buffers=specs(buffers), index=manifest.index,
            progress=manifest.progress, environment=manifest.environment,
        )  # fmt: skip
    world.barrier()


if __name__ == "__main__":
    main()
