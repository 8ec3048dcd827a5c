"""Ranks of a pipeline that run one step: as threads, or connected by MPI (then this file is each rank's program).

mpirun -n RANKS python stage_ranks.py FOLDER    # the graphs and job.json are there; results beside them
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from real_ranks import on_ranks
from safetensors.numpy import load_file, save_file
from stage_models import Model, batch_of
from thread_wire import on_threads

from ortflow.workflow.assembly.stages import StageGraphs
from ortflow.workflow.comm import Communicator
from ortflow.workflow.device import Buffer
from ortflow.workflow.device.cpu import CpuDevice
from ortflow.workflow.graph.types import LOSS_SUM, LOSS_WEIGHT, SEED, VALID
from ortflow.workflow.kernels.library import library_for
from ortflow.workflow.layout import FlatIndex, Tensor
from ortflow.workflow.onnx_runtime import onnxruntime
from ortflow.workflow.parallel.schedule import Kind
from ortflow.workflow.parallel.stage import StageSet
from ortflow.workflow.sessions.binding import Binding
from ortflow.workflow.sessions.session import Sessions
from ortflow.workflow.trainer import MicroBatch
from ortflow.workflow.trainer.stage_evaluation import StageEvaluation
from ortflow.workflow.trainer.stage_runner import StageRunner

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Rank:
    """A rank's flat buffers, as a trainer has them, and its runner."""

    index: FlatIndex
    runner: StageRunner
    evaluation: StageEvaluation
    gradients: Buffer
    statistics: Buffer
    running: Buffer
    sums: Buffer
    metrics: dict[str, Buffer]

    @classmethod
    def open(cls, root: Path, kind: Kind, pipeline: Communicator, *, kernels: bool, state: Sequence[str]) -> Rank:
        """The rank of a folder of graphs with the initial tensors beside them."""
        stages, tensors = StageSet.load(root), load_file(root / "initial.safetensors")
        trained = {name for stage in stages.stages for name in stage.trained}
        held = stages.tensors_of(pipeline.rank)
        groups = {name: "decay" if name in trained else "state" if name in state else "frozen" for name in held}
        index = FlatIndex.place(Tensor(name, tensors[name].shape, groups[name]) for name in held)  # type: ignore[arg-type]
        device = CpuDevice()
        library = library_for("auto") if kernels else None
        sessions = Sessions(device, 1, "error", library.path if library else None)
        parameters = device.allocate(index.size, np.float32)
        for entry in index:
            parameters.slice(entry.offset, entry.end).write(tensors[entry.name])
        start, end = index.span("state")
        gradients, scratch = (device.allocate(index.trained, np.float32) for _ in range(2))
        statistics, running = (device.allocate(end - start, np.float32) for _ in range(2))
        statistics.copy_from(parameters.slice(start, end))
        sums, metrics = device.allocate(2, np.float32), dict[str, Buffer]()

        def bind(session: onnxruntime.InferenceSession, _: Buffer) -> Binding:
            binding = Binding(session, device)
            binding.read_tensors(index, parameters)
            for entry in index:
                if f"{entry.name}_new" in binding.outputs:
                    part = entry.offset - start, entry.end - start
                    binding.read_from(entry.name, running.slice(*part), entry.tensor.shape)
                    binding.write_to(f"{entry.name}_new", statistics.slice(*part), entry.tensor.shape)
            for place, name in enumerate((LOSS_SUM, LOSS_WEIGHT)):
                if name in binding.outputs:
                    binding.write_to(name, sums.slice(place, place + 1), ())
            return binding

        def bind_evaluation(session: onnxruntime.InferenceSession) -> Binding:
            binding = Binding(session, device)
            binding.read_tensors(index, parameters)
            for name in sorted(name for name in binding.outputs if name.startswith("ortflow.")):
                metrics[name] = device.allocate(1, np.float32)
                binding.write_to(name, metrics[name], ())
            return binding

        runner = StageRunner(stages, kind, pipeline, sessions, index, bind, gradients, scratch)
        evaluation = StageEvaluation(stages, pipeline, sessions, bind_evaluation)
        return cls(index, runner, evaluation, gradients, statistics, running, sums, metrics)

    def step(self, batches: Sequence[MicroBatch], seeds: Sequence[int]) -> dict[str, Array]:
        """Losses by micro-batch, gradients and statistics."""
        losses: list[Array] = []
        self.gradients.fill(7)  # What an earlier step has left.
        self.runner.run(
            batches,
            seeds,
            feed=feed,
            before_forward=lambda: self.running.copy_from(self.statistics),
            after_loss=lambda: losses.append(self.sums.read()),
        )
        found: dict[str, Array] = {"losses": np.array(losses)}
        gradients, statistics = self.gradients.read(), self.statistics.read()
        for entry in self.index:
            if entry.tensor.group == "decay":
                found[f"{entry.name}_grad"] = gradients[entry.offset : entry.end].reshape(entry.tensor.shape)
            elif entry.tensor.group == "state":
                start = entry.offset - self.index.span("state")[0]
                part = statistics[start : start + entry.tensor.count]
                found[f"{entry.name}_new"] = part.reshape(entry.tensor.shape)
        return found

    def evaluate(self, batches: Sequence[MicroBatch]) -> list[dict[str, Array]]:
        """Loss and metrics of each batch, on the last rank."""
        found = []
        for batch in batches:
            self.evaluation.run(batch, lambda binding, batch=batch: feed(binding, batch, 0))  # type: ignore[misc]
            found.append({name: buffer.read() for name, buffer in self.metrics.items()})
        self.evaluation.finish()
        return found


def feed(binding: Binding, batch: MicroBatch, seed: int) -> None:
    """As the trainer does."""
    for name, array in {**batch.arrays, VALID: np.array([batch.count]), SEED: np.array([seed])}.items():
        if name in binding.inputs:
            binding.feed(name, array)


def batches_for(name: str, sizes: Sequence[int]) -> list[MicroBatch]:
    """Micro-batches of as many rows; those of none are not to be run."""
    return [MicroBatch(batch_of(name, seed, rows or 1), rows) for seed, rows in enumerate(sizes)]


def expected(
    model: Model, batches: Sequence[MicroBatch], seeds: Sequence[int], *, kernels: bool = False
) -> dict[str, Array]:
    """What one rank with the undivided graph gets."""
    tensors, losses, total = dict(model.source.tensors), [], dict[str, Array]()
    for batch, seed in zip(batches, seeds, strict=True):
        if not batch.count:
            continue
        onnxruntime.set_seed(seed)
        fed = {**tensors, **batch.arrays, VALID: np.array([batch.count]), SEED: np.array([seed])}
        found = model.undivided(fed, kernels=kernels)
        losses.append(np.array([found.pop(LOSS_SUM), found.pop(LOSS_WEIGHT)]))
        for name, array in found.items():
            if name.endswith("_new"):
                tensors[name.removesuffix("_new")] = total[name] = array
            else:
                total[name] = total[name] + array if name in total else array
    return {"losses": np.array(losses), **total}


def merged(made: StageSet, found: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """What the ranks found, gradients of weights that several hold added up."""
    result: dict[str, Array] = {"losses": found[-1]["losses"]}
    for name, ranks in made.holders().items():
        if f"{name}_grad" in found[ranks[0]]:
            result[f"{name}_grad"] = sum(found[rank][f"{name}_grad"] for rank in ranks)  # type: ignore[assignment]
        if f"{name}_new" in found[ranks[0]]:
            result[f"{name}_new"] = found[ranks[0]][f"{name}_new"]
    return result


def prepare(made: StageGraphs, model: Model) -> None:
    """Write what the ranks read."""
    made.write()
    save_file(
        {name: np.ascontiguousarray(a) for name, a in model.source.tensors.items()},
        made.stages.root / "initial.safetensors",
    )


def run_threads(
    root: Path,
    kind: Kind,
    batches: Sequence[MicroBatch],
    seeds: Sequence[int],
    *,
    kernels: bool = False,
    steps: int = 1,
    state: Sequence[str] = (),
) -> list[dict[str, Array]]:
    """The last of so many equal steps, on one thread for each rank."""

    def program(pipeline: Communicator) -> dict[str, Array]:
        rank = Rank.open(root, kind, pipeline, kernels=kernels, state=state)
        initial = rank.statistics.read()
        for _ in range(steps):
            rank.statistics.write(initial)
            found = rank.step(batches, seeds)
        return found

    return on_threads(StageSet.load(root).ranks, program)


def run_mpi(
    root: Path,
    kind: Kind,
    batches: Sequence[MicroBatch],
    seeds: Sequence[int],
    state: Sequence[str] = (),
    *,
    kernels: bool = True,
) -> list[dict[str, Array]]:
    """One step, with real ranks."""
    count = StageSet.load(root).ranks
    (root / "job.pickle").write_bytes(pickle.dumps((kind, list(batches), list(seeds), list(state), kernels)))
    on_ranks(count, __file__, str(root), OMP_NUM_THREADS="1")
    return [dict(np.load(root / f"rank{rank}.npz")) for rank in range(count)]


def main() -> None:
    """The program of each rank."""
    from ortflow.workflow.comm.mpi import MpiCommunicator

    root = Path(sys.argv[1])
    kind, batches, seeds, state, kernels = pickle.loads((root / "job.pickle").read_bytes())
    world = MpiCommunicator()
    rank = Rank.open(root, kind, world, kernels=kernels, state=state)
    np.savez(root / f"rank{world.rank}.npz", **rank.step(batches, seeds))
    world.close()


if __name__ == "__main__":
    main()
