"""Time of a training step on the CPU: ortflow against PyTorch, eager and torch.compile.

Beside it, ortflow with ONNX Runtime's own kernels alone, as it runs where no C compiler is found.

    python benchmarks/step.py [--layers 4 --width 256 --context 128 --batch 8 --threads 2 --rounds 8]

The same GPT with the same weights on the same batches, fp32, AdamW (fused in PyTorch), gradient clipping, the same
number of threads. All take turns, a few steps each, because a machine's speed drifts. First all losses must agree.
Prints medians, and ortflow's time over the better peer's: the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import torch
from safetensors.numpy import load_file
from torch_gpt import Sizes, TorchStep

from ortflow.workflow.assembly.build import build_graphs
from ortflow.workflow.assembly.updates import write_forms
from ortflow.workflow.comm import Communicator
from ortflow.workflow.comm.solo import SoloCommunicator
from ortflow.workflow.device import Device
from ortflow.workflow.device.cpu import CpuDevice
from ortflow.workflow.graph.autodiff.compose import compose
from ortflow.workflow.graph.forms import Form
from ortflow.workflow.graph.types import GraphSet
from ortflow.workflow.kernels.graph import with_kernels
from ortflow.workflow.kernels.library import find_library
from ortflow.workflow.optim.gradient import gradient_graph
from ortflow.workflow.optim.graph import optimizer_graph
from ortflow.workflow.optim.segments import segments
from ortflow.workflow.sessions.session import Sessions
from ortflow.workflow.spec.run import TrainerRunSpec
from ortflow.workflow.trainer import MicroBatch, Report
from ortflow.workflow.trainer.opening import open_trainer

sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "gpt"))
from model import Config, build

Tokens = npt.NDArray[np.int64]
Step = Callable[[Tokens, Tokens], float]
RATE, DECAY, CLIP = 1e-3, 0.1, 1.0
AGREEMENT = 5e-6
"""Largest relative difference of the losses over the first steps."""


class OrtflowStep:
    """One step of the trainer that ranks run."""

    def __init__(
        self,
        graphs: GraphSet,
        spec: TrainerRunSpec,
        threads: int,
        kernels: Path | None,
        device: Device | None = None,
        *,
        fuse: bool = True,
        communicator: Communicator | None = None,
    ) -> None:
        sessions = Sessions(device or CpuDevice(), threads, "error", kernels, fuse=fuse)
        notes = Report(lambda line: print(line, flush=True))
        self._trainer = open_trainer(graphs, spec, sessions, communicator or SoloCommunicator(), notes)
        self._trainer.load_tensors(load_file(graphs.initial))
        self._update = 0

    def __call__(self, tokens: Tokens, labels: Tokens, *, rate: float = RATE) -> float:
        """The loss before the update."""
        return self.of({"tokens": tokens, "labels": labels}, rate=rate)

    def over(self, stream: Iterable[dict[str, npt.NDArray[Any]]], *, begins: bool = True) -> Iterator[float]:
        """The losses of a stream, each batch of which is prefetched while the one before is computed, as in a run.

        With `begins` a step's passes begin while the host waits for the loss before, as in a run, if the trainer can.
        """
        from ortflow.workflow.data.batches import StepBatch
        from ortflow.workflow.data.epoch_positions import Position
        from ortflow.workflow.steps.shard import prefetched

        def steps() -> Iterator[StepBatch]:
            for arrays in stream:
                rows = len(arrays["labels"])
                yield StepBatch([MicroBatch(arrays, rows)], 0, rows, Position(0, 0), epoch_end=False)

        trainer, begun = self._trainer, list[MicroBatch]()

        def begin() -> None:
            for step in itertools.islice(ahead, 1):
                begun.append(step.micro_batches[0])
                trainer.begin([begun[0]], seeds=[self._update + 1], control_values=())

        with prefetched(steps(), trainer.prefetch) as ahead:
            if begins and trainer.begins:
                trainer.before_wait = begin
            for step in ahead:
                yield self._of(step.micro_batches[0])
                while begun:
                    yield self._of(begun.pop())

    def close(self) -> None:
        """Release the trainer's memory. Called by all ranks."""
        self._trainer.end_training()

    def of(self, arrays: dict[str, npt.NDArray[Any]], *, rate: float = RATE) -> float:
        """The same of a model's inputs by name; the first axis of each is the batch."""
        return self._of(MicroBatch(arrays, len(arrays["labels"])), rate=rate)

    def _of(self, batch: MicroBatch, *, rate: float = RATE) -> float:
        self._update += 1
        number = self._update
        return self._trainer.step([batch], learning_rate=rate, update=number, seeds=[number], control_values=()).loss


def make_graphs(
    config: Config, batch: int, folder: Path, *, on_gpus: bool = False, precision: str = "fp32"
) -> tuple[GraphSet, TrainerRunSpec]:
    """The graphs of the example's model, as step configure makes them."""
    onnx.save(build(config), folder / "model.onnx")
    spec = run_file(batch, folder, on_gpus=on_gpus, precision=precision)
    lengths = {"tokens": config.context, "labels": config.context}
    return graphs_of(spec, folder, on_gpus=on_gpus, lengths=lengths), spec


def run_file(batch: int, folder: Path, *, on_gpus: bool = False, precision: str = "fp32") -> TrainerRunSpec:
    """The run file of the example's model."""
    return TrainerRunSpec.model_validate(
        {
            "name": "benchmark",
            "model": {"path": str(folder / "model.onnx"), "loss": {"kind": "cross_entropy"}},
            "data": {"train": {"path": "none"}, "micro_batch": batch},
            "train": {
                "steps": 1,
                "precision": precision,
                "optimizer": {"name": "adamw", "lr": RATE, "weight_decay": DECAY},
                "clip_norm": CLIP,
            },
            "resources": {"gpus_per_rank": int(on_gpus)},
        }
    )


def graphs_of(
    spec: TrainerRunSpec, folder: Path, *, on_gpus: bool = False, lengths: Mapping[str, int] | None = None
) -> GraphSet:
    """All graphs of a run in a folder, as step configure makes them; `lengths` are those of the samples, by input."""
    graphs = build_graphs(spec, folder / "graphs", lengths=lengths)
    rule, cuts = spec.train.optimizer, segments(spec.train.optimizer, graphs.index)
    own = with_kernels(optimizer_graph(rule, cuts, kernels=True))
    for path, each in ((graphs.optimizer, optimizer_graph(rule, cuts)), (Form.KERNELS.of(graphs.optimizer), own)):
        path.write_bytes(compose(each).SerializeToString())
    if on_gpus:
        write_forms(graphs, spec.train.precision)
    scaling = gradient_graph()
    for path, each in ((graphs.gradient, scaling), (Form.KERNELS.of(graphs.gradient), with_kernels(scaling))):
        path.write_bytes(each.SerializeToString())
    return graphs


def batches(config: Config, batch: int, seed: int = 0) -> Iterator[tuple[Tokens, Tokens]]:
    """Random windows and the same shifted by one."""
    random = np.random.default_rng(seed)
    while True:
        window = random.integers(0, config.vocabulary, (batch, config.context + 1))
        yield np.ascontiguousarray(window[:, :-1]), np.ascontiguousarray(window[:, 1:])


def check_losses(steps: dict[str, Step], stream: Iterator[tuple[Tokens, Tokens]]) -> None:
    """Three updates on the same batches must give the same losses; also warms everything up."""
    for _ in range(3):
        arrays = next(stream)
        losses = {name: step(*arrays) for name, step in steps.items()}
        spread = max(losses.values()) - min(losses.values())
        if not spread <= AGREEMENT * min(losses.values()):
            raise SystemExit(f"the losses differ, so the times mean nothing: {losses}")


def race(
    steps: dict[str, Step], stream: Iterator[tuple[Tokens, Tokens]], rounds: int, block: int
) -> dict[str, list[float]]:
    """Median seconds of a step, for each round and candidate."""
    medians: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            # One step untimed: the threads of the candidate before may still spin, caches are cold.
            step(*next(stream))
            seconds = []
            for _ in range(block):
                arrays = next(stream)
                start = time.perf_counter()
                step(*arrays)
                seconds.append(time.perf_counter() - start)
            medians[name].append(statistics.median(seconds))
    return medians


def report(medians: dict[str, list[float]]) -> float:
    """Print the table; ortflow over the better peer."""
    overall = {name: statistics.median(values) for name, values in medians.items()}
    for name, values in medians.items():
        spread = f"rounds {1e3 * min(values):.1f} to {1e3 * max(values):.1f}"
        print(f"{name:14} {1e3 * overall[name]:8.1f} ms a step   ({spread})")
    best = min((name for name in overall if name.startswith("torch")), key=overall.__getitem__)
    ratio = statistics.median(a / b for a, b in zip(medians["ortflow"], medians[best], strict=True))
    print(f"ortflow / {best} = {ratio:.2f}")
    return ratio


def main() -> None:
    """Build, check, race, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("layers", "width", "heads", "context", "vocabulary"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Config(), name))
    for name, value in (("batch", 8), ("threads", 2), ("rounds", 8), ("block", 4)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out: it takes half a minute")
    options = parser.parse_args()
    sizes: dict[str, Any] = {name: getattr(options, name) for name in vars(Sizes(0, 0, 0, 0, 0))}
    config = Config(**sizes)
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        graphs, spec = make_graphs(config, options.batch, Path(folder))
        weights = load_file(graphs.initial)
        library = find_library()
        print(f"CPU kernels: {library.note}")
        steps: dict[str, Step] = {"ortflow": OrtflowStep(graphs, spec, options.threads, library.path)}
        if library.path is not None:
            steps["ONNX Runtime's"] = OrtflowStep(graphs, spec, options.threads, None)
        for name, compiled in (("torch eager", False), ("torch.compile", True)):
            if not (compiled and options.no_compile):
                steps[name] = TorchStep(
                    Sizes(**sizes), weights, rate=RATE, weight_decay=DECAY, clip=CLIP, compiled=compiled
                )
        stream = batches(config, options.batch)
        check_losses(steps, stream)
        report(race(steps, stream, options.rounds, options.block))


if __name__ == "__main__":
    main()
