"""The bubble of a pipeline on CPU ranks, measured, beside (p-1)/(v m + p-1).

    python benchmarks/pipeline.py [--ranks 2 --micro-batches 1 2 4 8 16 --rows 8 --layers 4 --width 256]

Cuts a decoder like examples/gpt into stages, starts one rank with one thread for each, and runs the passes of a step
without the update. The bubble is the share of a step in which a rank computes nothing, averaged over the ranks: the
median over the steps. The formula is for stages that take equal time and messages that take none. `predicted` is the
schedule's timeline with the times that the ranks measured for their own passes. Other work on the machine lengthens
steps and passes unevenly: measure on a machine that does nothing else, with a core for each rank.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from safetensors.numpy import load_file

from ortflow.workflow.assembly.build import build_graphs
from ortflow.workflow.comm.mpi import MpiCommunicator
from ortflow.workflow.device import Buffer
from ortflow.workflow.device.cpu import CpuDevice
from ortflow.workflow.kernels.library import library_for
from ortflow.workflow.layout import FlatIndex, Tensor
from ortflow.workflow.onnx_runtime import onnxruntime
from ortflow.workflow.parallel.division import folder_of
from ortflow.workflow.parallel.schedule import Action, schedule
from ortflow.workflow.parallel.stage import StageSet
from ortflow.workflow.parallel.timeline import bubble_by_formula, timeline
from ortflow.workflow.sessions.binding import Binding
from ortflow.workflow.sessions.session import Sessions
from ortflow.workflow.spec.run import TrainerRunSpec
from ortflow.workflow.trainer import MicroBatch
from ortflow.workflow.trainer.stage_runner import StageRunner

KINDS = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2))
WARM_UP = 2


class Clock:
    """Seconds that the graphs of a rank have run."""

    def __init__(self) -> None:
        self.busy = 0.0

    def timed(self, run: Callable[..., None]) -> Callable[..., None]:
        """The same, with its time counted."""

        def measured(*args: Any, **kwargs: Any) -> None:
            start = time.perf_counter()
            run(*args, **kwargs)
            self.busy += time.perf_counter() - start

        return measured


def opened(root: Path, kind: str, world: MpiCommunicator, clock: Clock) -> StageRunner:
    """A rank's runner, with the initial parameters."""
    stages, tensors, device = StageSet.load(folder_of(root, 0)), load_file(root / "initial.safetensors"), CpuDevice()
    names = stages.tensors_of(world.rank)
    index = FlatIndex.place(Tensor(name, tensors[name].shape, "decay") for name in names)
    library = library_for("auto")
    sessions = Sessions(device, 1, "error", library.path if library is not None else None)
    parameters, gradients, scratch = (device.allocate(index.size, np.float32) for _ in range(3))
    for entry in index:
        parameters.slice(entry.offset, entry.end).write(tensors[entry.name])

    def bind(session: onnxruntime.InferenceSession, _: Buffer) -> Binding:
        binding = Binding(session, device)
        binding.read_tensors(index, parameters)
        for name in binding.outputs & {"ortflow.loss_sum", "ortflow.loss_weight"}:
            binding.write_to(name, device.allocate(1, np.float32), ())
        binding.run = clock.timed(binding.run)  # type: ignore[method-assign]
        return binding

    return StageRunner(stages, kind, world, sessions, index, bind, gradients, scratch)  # type: ignore[arg-type]


def feed(binding: Binding, batch: MicroBatch, seed: int) -> None:
    """What a graph reads of a micro-batch."""
    for name, array in batch.arrays.items():
        if name in binding.inputs:
            binding.feed(name, array)


def rank(root: Path, options: argparse.Namespace) -> None:
    """What each rank does; rank 0 prints its findings as one line of JSON."""
    world, clock = MpiCommunicator(), Clock()
    runner = opened(root, options.kind, world, clock)
    random = np.random.default_rng(0)
    rows = []
    for count in options.micro_batches:
        windows = random.integers(0, 256, (count, options.rows, options.context + 1))
        batches = [MicroBatch({"tokens": w[:, :-1], "labels": w[:, 1:]}, options.rows) for w in windows]
        for step in range(WARM_UP + options.steps):
            world.barrier()
            clock.busy, start = 0.0, time.perf_counter()
            runner.run(batches, [1] * count, feed=feed, before_forward=lambda: None, after_loss=lambda: None)
            found = world.gather((clock.busy, time.perf_counter() - start))
            if found is not None and step >= WARM_UP:
                busy, length = [each[0] for each in found], max(each[1] for each in found)
                rows.append({"micro_batches": count, "busy": busy, "seconds": length})
    if world.rank == 0:
        print(json.dumps(rows))
    world.close()


def measure(root: Path, kind: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Start the ranks; what they found of each step."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    numbers = [f"--{name}={getattr(options, name)}" for name in ("rows", "context", "steps")]
    counts = ["--micro-batches", *map(str, options.micro_batches)]
    command = [sys.executable, __file__, "--root", str(root), "--kind", kind, *numbers, *counts]
    done = subprocess.run(
        ["mpirun", "-n", str(options.ranks), *command], check=True, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def prepare(folder: Path, kind: str, chunks: int, options: argparse.Namespace) -> Path:
    """The graphs of the stages."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "gpt"))
    from model import Config, build

    model = folder / "model.onnx"
    onnx.save(build(Config(options.layers, options.width, 4, options.context, 256)), model)
    parallel: dict[str, Any] = {"pipeline": options.ranks, "schedule": kind}
    spec = TrainerRunSpec.model_validate(
        {
            "name": "pipeline",
            "model": {"path": str(model), "loss": {"kind": "cross_entropy"}},
            "data": {"train": {"path": "unused"}, "micro_batch": options.rows},
            "train": {"steps": 1, "optimizer": {"name": "adamw", "lr": 1e-3}},
            "resources": {"ranks_per_node": options.ranks},
            "parallel": {**parallel, "chunks": chunks} if chunks > 1 else parallel,
        }
    )
    return build_graphs(spec, folder / kind, options.context).root


def main() -> None:
    """Measure each schedule; print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--root", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.root:
        rank(options.root, options)
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if cores < options.ranks:
        parser.error(f"{options.ranks} ranks need as many cores, and there are {cores}")
    print(f"{options.ranks} ranks on {cores} cores, load {os.getloadavg()[0]:.1f} before the start")
    columns = f"{'schedule':12} {'m':>3} {'ms a step':>10} {'busy, ms by rank':>22}"
    print(f"{columns} {'measured':>9} {'predicted':>9} {'formula':>8}")
    for kind, chunks in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            found = measure(prepare(Path(folder), kind, chunks, options), kind, options)
        for count in options.micro_batches:
            steps = [row for row in found if row["micro_batches"] == count]
            busy = [statistics.median(row["busy"][place] for row in steps) for place in range(options.ranks)]
            bubble = statistics.median(1 - sum(row["busy"]) / options.ranks / row["seconds"] for row in steps)
            print(
                f"{kind:12} {count:3} {1e3 * statistics.median(row['seconds'] for row in steps):10.1f}"
                f" {'  '.join(f'{1e3 * each:.1f}' for each in busy):>22} {bubble:9.3f}"
                f" {predicted(kind, chunks, count, busy):9.3f} {bubble_by_formula(options.ranks, count, chunks):8.3f}"
            )


def predicted(kind: str, chunks: int, count: int, busy: list[float]) -> float:
    """The bubble of the timeline with a rank's measured time, of which a third are forward passes."""

    def duration(place: int, action: Action) -> float:
        return busy[place] / count / chunks * (1 / 3 if action.direction == "forward" else 2 / 3)

    return timeline(schedule(kind, len(busy), count, chunks), duration).bubble  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
