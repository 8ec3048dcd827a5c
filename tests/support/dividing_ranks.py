"""Ranks of a grid, each of which holds the whole model as its part: a program for tests, and functions to start it.

What the parts of a layer have in common must count once, and does so here for every tensor.

mpirun -n RANKS python dividing_ranks.py FOLDER    # the jobs in FOLDER/jobs.json; results beside it
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from divided_models import undivided
from real_ranks import on_ranks
from safetensors.numpy import load_file
from sharing_ranks import SAMPLES, Array, Job, Outcome
from sharing_ranks import train as train_alone

from ortflow.workflow.comm import Communicator
from ortflow.workflow.comm.grid import GridRanks
from ortflow.workflow.comm.solo import SoloCommunicator
from ortflow.workflow.device.cpu import CpuDevice
from ortflow.workflow.graph.types import GraphSet
from ortflow.workflow.kernels.library import library_for
from ortflow.workflow.sessions.session import Sessions
from ortflow.workflow.spec.run import TrainerRunSpec
from ortflow.workflow.trainer import Report
from ortflow.workflow.trainer.context import StepContext
from ortflow.workflow.trainer.opening import LAYOUTS, Assembly, layout_of
from ortflow.workflow.trainer.opening import Divided as DividedModel
from ortflow.workflow.trainer.step import GraphTrainer


@dataclass(frozen=True)
class Divided:
    """A job under a grid."""

    job: Job
    data: int
    parts: int

    @property
    def name(self) -> str:
        return f"{self.job.name}-{self.data}x{self.parts}-{self.job.stage}"

    def spec(self) -> TrainerRunSpec:
        whole = self.job.spec(self.data).model_dump()
        whole["parallel"]["horizontal"] = self.parts
        whole["resources"]["ranks_per_node"] = self.data * self.parts
        return TrainerRunSpec.model_validate(whole)


def opened(graphs: GraphSet, spec: TrainerRunSpec, world: Communicator) -> GraphTrainer:
    """The trainer of this rank; every rank holds every tensor whole."""
    library = library_for(spec.resources.kernels)
    sessions = Sessions(CpuDevice(), 1, "error", library.path if library else None)
    ranks, division = GridRanks.connect(world, spec.grid), undivided(graphs.index, spec.grid)
    context = StepContext(graphs, spec, sessions, ranks.replicas, Report())
    divided = DividedModel(graphs, ranks, division)
    trainer = Assembly(context, LAYOUTS[layout_of(spec)], "immediate", divided).trainer()
    trainer.load_tensors(load_file(graphs.initial))
    return trainer


def train(divided: Divided, world: Communicator) -> tuple[Array, dict[str, Array]]:
    """Loss and norm of each step, then the loss of an evaluation, and this rank's share of the state."""
    job = divided.job
    graphs, spec = GraphSet.load(Path(job.graphs)), divided.spec()
    trainer, replica = opened(graphs, spec, world), spec.grid.place(world.rank).data
    curve, updates = [], 0
    for step in range(job.steps):
        batches = job.batches(step, replica, divided.data)
        outcome = trainer.step(
            batches, learning_rate=1e-2, update=updates + 1, seeds=[1] * len(batches), control_values=[1.0]
        )
        assert outcome.control_values == [world.world_size]
        assert outcome.samples == SAMPLES - (len(job.short) > 0 and step in job.short) * spec.data.micro_batch
        updates += outcome.skipped is None
        curve.append([outcome.loss, outcome.grad_norm])
    trainer.before_save()
    evaluation = trainer.evaluate(job.batches(0, replica, divided.data), lambda: [1.0])
    assert evaluation.control_values == [world.world_size]
    assert evaluation.samples == SAMPLES
    curve.append([evaluation.metrics["loss"], 0.0])
    return np.array(curve), {name: share.part.read() for name, share in trainer.state().items()}


def run_grid(
    data: int, parts: int, folder: Path, jobs: list[Divided], program: tuple[str, ...] = (__file__,)
) -> dict[str, tuple[Array, dict[str, Array]]]:
    """Curve and whole state of each job, by name; `program` is this one, or one that calls its `main`."""
    folder.mkdir(parents=True)
    (folder / "jobs.json").write_text(json.dumps([asdict(job) for job in jobs]))
    on_ranks(data * parts, *program, str(folder), timeout=300, OMP_NUM_THREADS="1")
    found: dict[str, tuple[Array, dict[str, Array]]] = {}
    for job in jobs:
        files = [np.load(folder / f"{job.name}-{rank}.npz") for rank in range(data * parts)]
        assert all(np.array_equal(each["curve"], files[0]["curve"], equal_nan=True) for each in files)
        names = set(files[0].files) - {"curve"}
        found[job.name] = files[0]["curve"], {name: np.concatenate([each[name] for each in files]) for name in names}
    return found


def main() -> None:
    """The program of each rank."""
    from ortflow.workflow.comm.mpi import MpiCommunicator

    folder, world = Path(sys.argv[1]), MpiCommunicator()
    for content in json.loads((folder / "jobs.json").read_text()):
        job = Divided(Job(**content.pop("job")), **content)
        curve, shares = train(job, world)
        np.savez(folder / f"{job.name}-{world.rank}.npz", curve=curve, **shares)  # type: ignore[arg-type]
    world.close()


def plain(job: Job) -> Outcome:
    """The same job on one rank, in one micro-batch."""
    return train_alone(Job(**{**vars(job), "micro_batches": 1, "stage": 0}), SoloCommunicator())


if __name__ == "__main__":
    main()
