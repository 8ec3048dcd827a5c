"""Ranks that train under every ZeRO stage, connected by MPI: a program for tests, and functions to start it.

mpirun -n RANKS python sharing_ranks.py FOLDER    # the jobs in FOLDER/jobs.json; results beside it
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
from graph_build_models import built, run_file, save_model, value
from onnx import helper
from real_ranks import on_ranks
from trainers import opened, write_update

from ortflow.workflow.checkpoint.commit import commit
from ortflow.workflow.checkpoint.load import load, window_for
from ortflow.workflow.checkpoint.store import DirectoryStore
from ortflow.workflow.checkpoint.writer import Writer, specs
from ortflow.workflow.comm import Communicator
from ortflow.workflow.device.cpu import CpuDevice, HostBuffer
from ortflow.workflow.device.shard import Shard
from ortflow.workflow.graph.types import GraphSet
from ortflow.workflow.run.pace import pace_of_steps
from ortflow.workflow.spec.run import TrainerRunSpec
from ortflow.workflow.trainer import MicroBatch, Report
from ortflow.workflow.trainer.step import GraphTrainer

Array = npt.NDArray[Any]
SAMPLES = 24
"""Of a step, over all ranks: 1, 2, 3 and 4 ranks and 1 or 2 micro-batches divide them."""


@dataclass(frozen=True)
class Job:
    """A few steps of one run, under one stage."""

    name: str
    graphs: str
    changes: dict[str, Any]
    stage: int = 0
    micro_batches: int = 1
    steps: int = 6
    damaged: list[int] = field(default_factory=list)
    """Steps with a NaN in one sample of the last rank."""
    short: list[int] = field(default_factory=list)
    """Steps whose last micro-batch of the last rank holds no sample."""
    resumes: str = ""
    """Folder of checkpoints that it begins with."""
    arrays: str = ""
    """Samples of all steps by input, [steps * SAMPLES, ...], instead of those of `perceptron`."""
    saves: str = ""
    """Folder in which a checkpoint is left behind the last step."""
    measured: bool = False
    """Whether to measure what the process holds behind the last step, which takes half a second."""

    def spec(self, ranks: int) -> TrainerRunSpec:
        """The run file."""
        size = SAMPLES // ranks // self.micro_batches
        return run_file(
            Path(self.graphs).parent / "model.onnx", data__micro_batch=size, resources__ranks_per_node=ranks,
            train__gradient_accumulation=self.micro_batches, parallel__zero=self.stage, **self.changes,
        )  # fmt: skip

    def batches(self, step: int, rank: int, ranks: int) -> list[MicroBatch]:
        """This rank's micro-batches of a step; all ranks together have the same samples."""
        samples = self._samples(step)
        made, size = [], SAMPLES // ranks // self.micro_batches
        for micro in range(self.micro_batches):
            first = (micro * ranks + rank) * size
            last = micro == self.micro_batches - 1 and rank == ranks - 1
            arrays = {name: array[first : first + size] for name, array in samples.items()}
            made.append(MicroBatch(arrays, 0 if last and step in self.short else size))
        return made

    def _samples(self, step: int) -> dict[str, Array]:
        """Of all ranks."""
        if self.arrays:
            with np.load(self.arrays) as arrays:
                return {name: array[step * SAMPLES : (step + 1) * SAMPLES] for name, array in arrays.items()}
        random = np.random.default_rng(step)
        x, labels = random.normal(size=(SAMPLES, 5)).astype("float32"), random.integers(0, 3, SAMPLES)
        if step in self.damaged:
            x[-1, 2] = np.nan
        return {"x": x, "labels": labels}


@dataclass(frozen=True)
class Outcome:
    """Results of a job, on a rank or in the parent process."""

    curve: Array
    """Loss and gradient norm of each step, NaN where it was skipped."""
    skipped: list[int]
    state: dict[str, Array]
    """Parameters, and this rank's part of the moments."""
    starts: dict[str, int]
    """First element of each part."""
    notes: list[str]
    memory: dict[str, int]
    largest: int
    """Elements of the largest buffer that was allocated."""
    sharded: bool
    """The parameters are this rank's share."""
    resident: int
    """Bytes of the process behind the last step; 0 if they are not measured."""


def perceptron(path: Path) -> Path:
    """Five numbers to three classes; the second weight is two thirds of all, and no share of 2 to 4 ends with it."""
    random = np.random.default_rng(0)
    shapes = {"first": (5, 37), "a": (37,), "second": (37, 29), "b": (29,), "third": (29, 3)}
    tensors = {name: (random.normal(size=shape) / 3).astype("float32") for name, shape in shapes.items()}
    nodes = [
        helper.make_node("Gemm", ["x", "first", "a"], ["h"], name="/in"),
        helper.make_node("Tanh", ["h"], ["t"], name="/tanh"),
        helper.make_node("Gemm", ["t", "second", "b"], ["g"], name="/middle"),
        helper.make_node("Sigmoid", ["g"], ["s"], name="/sigmoid"),
        helper.make_node("MatMul", ["s", "third"], ["y"], name="/out"),
    ]
    return save_model(path, nodes, [value("x", ["batch", 5])], [value("y", ["batch", 3])], tensors)


def tower(path: Path, width: int, depth: int) -> Path:
    """Five numbers to three classes through `depth` square layers."""
    random = np.random.default_rng(0)
    names = ["in", *(f"h.{place}" for place in range(depth)), "out"]
    shapes = [(5, width), *[(width, width)] * depth, (width, 3)]
    scale = 1 / np.sqrt(width)
    tensors = {
        f"{name}.w": (random.normal(size=shape) * scale).astype("float32")
        for name, shape in zip(names, shapes, strict=True)
    }
    nodes, last = [], "x"
    for name in names:
        nodes.append(helper.make_node("MatMul", [last, f"{name}.w"], [f"{name}.m"], name=f"/{name}/MatMul"))
        last = "y" if name == "out" else f"{name}.t"
        operator = "Identity" if name == "out" else "Tanh"
        nodes.append(helper.make_node(operator, [f"{name}.m"], [last], name=f"/{name}/{operator}"))
    return save_model(path, nodes, [value("x", ["batch", 5])], [value("y", ["batch", 3])], tensors)


def graphs_of(model: Path, **changes: Any) -> str:
    """The graphs of a job, beside its model."""
    spec, graphs = run_file(model, **changes), built(model, **changes)
    write_update(graphs, spec)
    return str(graphs.root)


def train(job: Job, world: Communicator) -> Outcome:
    """Run a job on this rank."""
    graphs, spec, notes = GraphSet.load(Path(job.graphs)), job.spec(world.world_size), list[str]()
    with allocations() as counts:
        return _train(job, world, opened(graphs, spec, world, Report(note=notes.append)), notes, counts)


@contextmanager
def allocations() -> Iterator[list[int]]:
    """The elements of each buffer that is allocated inside."""
    counts, allocate = list[int](), CpuDevice.allocate

    def counted(device: CpuDevice, count: int, dtype: npt.DTypeLike) -> HostBuffer:
        counts.append(count)
        return allocate(device, count, dtype)

    with mock.patch.object(CpuDevice, "allocate", counted):
        yield counts


def _train(job: Job, world: Communicator, trainer: GraphTrainer, notes: list[str], counts: list[int]) -> Outcome:
    if job.resumes:
        take_up(trainer, DirectoryStore(Path(job.resumes)))
    curve, skipped, updates = [], [], 0
    for step in range(job.steps):
        batches = job.batches(step, world.rank, world.world_size)
        seeds = [1] * len(batches)
        trainer.at(pace_of_steps(step + 1), 0.25)
        outcome = trainer.step(batches, learning_rate=1e-2, update=updates + 1, seeds=seeds, control_values=[1.0])
        assert outcome.control_values == [world.world_size]
        if outcome.skipped is not None:
            skipped.append(step)
            trainer.give_memory_back()
        updates += outcome.skipped is None
        curve.append([outcome.loss, outcome.grad_norm])
    resident = resident_now(trainer) if job.measured else 0
    trainer.before_save()
    if job.saves:
        leave(trainer, DirectoryStore(Path(job.saves)), world)
    parts = {name: each.part if isinstance(each, Shard) else each for name, each in trainer.state().items()}
    starts = {name: each.start if isinstance(each, Shard) else 0 for name, each in trainer.state().items()}
    memory = dict(trainer.memory())
    sharded = isinstance(trainer.state()["parameters"], Shard)
    state = {name: part.read() for name, part in parts.items()}
    return Outcome(np.array(curve), skipped, state, starts, notes, memory, max(counts), sharded, resident)


def resident_now(trainer: GraphTrainer) -> int:
    """Bytes that this process holds, without what freed memory is kept for the next step."""
    trainer.give_memory_back()
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def take_up(trainer: GraphTrainer, store: DirectoryStore) -> None:
    """Fill the state from the checkpoint, as a resumed run does."""
    targets = {name: window_for(buffer) for name, buffer in trainer.state().items()}
    load(store, 1, targets, index=trainer.index)
    trainer.after_load()


def saved_buffers(folder: Path) -> dict[str, Array]:
    """Whole flat buffers of a checkpoint that `leave` made."""
    return dict(load(DirectoryStore(folder), 1).buffers)


def leave(trainer: GraphTrainer, store: DirectoryStore, world: Communicator) -> None:
    """Make a checkpoint, as a run does."""
    writer = Writer(store, trainer.state(), rank=world.rank, world_size=world.world_size, attempt=0)
    writer.start(1, urgent=True)
    records = world.gather(writer.wait().record)
    if records is not None:
        progress = {"step": 1, "updates": 1, "epoch": 0, "sample": 0}
        buffers = specs(trainer.state())
        commit(store, 1, 0, records, buffers=buffers, index=trainer.index, progress=progress, environment={})
    world.barrier()


def run_ranks(count: int, folder: Path, jobs: list[Job], **variables: str) -> list[dict[str, Outcome]]:
    """Results of each of `count` ranks for each job, by name and stage."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "jobs.json").write_text(json.dumps([asdict(job) for job in jobs]))
    on_ranks(count, __file__, str(folder), timeout=300, **{"OMP_NUM_THREADS": "1", **variables})
    return [{job.name: _read(folder, job, rank) for job in jobs} for rank in range(count)]


def _write(folder: Path, job: Job, rank: int, outcome: Outcome) -> None:
    np.savez(folder / f"{job.name}-{rank}.npz", curve=outcome.curve, **outcome.state)  # type: ignore[arg-type]
    rest = {name: each for name, each in vars(outcome).items() if name not in ("curve", "state")}
    (folder / f"{job.name}-{rank}.json").write_text(json.dumps(rest))


def _read(folder: Path, job: Job, rank: int) -> Outcome:
    with np.load(folder / f"{job.name}-{rank}.npz") as arrays:
        state = dict(arrays)
    rest = json.loads((folder / f"{job.name}-{rank}.json").read_text())
    return Outcome(state.pop("curve"), state=state, **rest)


def main() -> None:
    """The program of each rank."""
    from ortflow.workflow.comm import mpi
    from ortflow.workflow.graph.shards import layer_groups as layers
    from ortflow.workflow.trainer import shard_exchange as exchange

    folder = Path(sys.argv[1])
    # Small buffers would otherwise go in one piece.
    mpi.PIECE = exchange.MESSAGE = int(os.environ.get("PIECE", mpi.PIECE))
    layers.SMALL = int(os.environ.get("SMALL", layers.SMALL))
    world = mpi.MpiCommunicator()
    for content in json.loads((folder / "jobs.json").read_text()):
        job = Job(**content)
        _write(folder, job, world.rank, train(job, world))
    world.close()


if __name__ == "__main__":
    main()
