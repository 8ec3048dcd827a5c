"""A GPT divided over two NVIDIA GPUs: ortflow's layouts against one GPU, PyTorch's pipelining and tensor parallelism.

    python benchmarks/cuda_layouts.py [--layers 12 --width 768 --heads 12 --context 1024 --vocabulary 50304 --batch 8
        --micro 1 2 4 8 16 --rounds 6 --layouts 1f1b gpipe interleaved horizontal sequence
        --peers "torch 1f1b" "torch tensor"]

Every candidate trains the same weights on the same batches in bf16 (PyTorch by autocast): AdamW, clipping, the host
waiting for each loss. A step has `--micro` micro-batches of `--batch` samples. Prints tokens a second, the part of
the time in which GPUs do not do what one GPU does: 1 - (time of one GPU / 2) / time, beside (p - 1) / (m + p - 1), and
the memory in use on the fuller GPU after the last step, with what each library keeps unused. PyTorch's stages have
`--peer-layers` layers on the first rank, by default two thirds; ortflow chooses its own cut. The gradient of the
embedding, which both stages use, is summed over the ranks. SystemExit if losses differ. mpirun of the environment's MPI
starts the ranks.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from candidate import Failed, leave, measured

ALONE = "one GPU"
AGREEMENT = 1e-2
"""Largest relative difference of the losses of the first steps: bf16 on both sides."""
WARM = 5
LAYOUTS: dict[str, dict[str, Any]] = {
    "1f1b": {"pipeline": 2},
    "gpipe": {"pipeline": 2, "schedule": "gpipe"},
    "interleaved": {"pipeline": 2, "schedule": "interleaved", "chunks": 2},
    "horizontal": {"horizontal": 2},
    "sequence": {"horizontal": 2, "sequence_parallel": True},
}
PIPELINES = ["torch 1f1b", "torch gpipe", "torch 1f1b compiled", "torch gpipe compiled"]
PEERS = [*PIPELINES, "torch tensor", "torch tensor compiled"]
Batches = Sequence[tuple[Any, Any]]
Step = Callable[[Batches], float]


def measure(options: argparse.Namespace) -> None:
    """What each rank does for one candidate; rank 0 prints the results as JSON."""
    import torch

    if options.measure not in options.peers:
        # Where a rank that waits forever does so. It cannot print the frames of PyTorch's compiler.
        faulthandler.dump_traceback_later(0.8 * options.limit, exit=True)
    from cuda_ranks import connect_torch, world_of
    from step import Config, Sizes

    comm, device, means = world_of()
    torch.cuda.set_device(comm.rank)
    torch.set_float32_matmul_precision("high")
    sizes = Sizes(**{name: getattr(options, name) for name in vars(Sizes(0, 0, 0, 0, 0))})
    config, folder = Config(**vars(sizes)), Path(options.folder)
    found: dict[str, Any] = {"gpu": device.gpu.name, "torch": torch.__version__, "sums": means}
    name = options.measure
    if name in options.peers:
        connect_torch(comm, str(meeting(options.folder, name).parent))
        step: Step = peer(sizes, comm.rank, folder, name, options.peer_layers or 2 * sizes.layers // 3)
    else:
        step = Ortflow(options, name, comm, device)
    found |= _measured(step, config, options, least=2 if name in PIPELINES else 1)
    if comm.world_size > 1:
        found["gib"] = max(comm.gather(found["gib"]) or [0.0])
    if comm.rank == 0:
        print(json.dumps(found), flush=True)
    leave(comm.barrier)


def _measured(step: Step, config: Any, options: argparse.Namespace, least: int) -> dict[str, Any]:
    """Losses of the first steps, and the median seconds of a step by the number of micro-batches, from `least` on."""
    from step import batches

    stream = batches(config, options.batch)
    most = max(options.micro)
    losses = [step(_taken(stream, most)) for _ in range(WARM)]
    seconds = {}
    for micro in (each for each in options.micro if each >= least):
        given = [_taken(stream, micro) for _ in range(options.rounds + 1)]
        times = []
        for each in given:
            begun = time.perf_counter()
            step(each)
            times.append(time.perf_counter() - begun)
        seconds[str(micro)] = statistics.median(times[1:])
    free, total = _memory()
    return {"losses": losses, "seconds": seconds, "gib": round((total - free) / 2**30, 2)}


def _taken(stream: Iterator[tuple[Any, Any]], count: int) -> list[tuple[Any, Any]]:
    return [next(stream) for _ in range(count)]


def _memory() -> tuple[int, int]:
    import torch

    return torch.cuda.mem_get_info()


def spec_of(options: argparse.Namespace, name: str) -> Any:
    """The run file of a layout, or of one GPU."""
    from step import CLIP, DECAY, RATE

    from ortflow.workflow.spec.run import TrainerRunSpec

    parallel = LAYOUTS.get(name, {})
    return TrainerRunSpec.model_validate(
        {
            "name": "benchmark",
            "model": {"path": str(Path(options.folder) / name / "model.onnx"), "loss": {"kind": "cross_entropy"}},
            "data": {"train": {"path": "none"}, "micro_batch": options.batch},
            "train": {
                "steps": 1, "precision": "bf16", "gradient_accumulation": max(2, *options.micro),
                "optimizer": {"name": "adamw", "lr": RATE, "weight_decay": DECAY}, "clip_norm": CLIP,
            },
            "parallel": parallel,
            "resources": {"gpus_per_rank": 1, "ranks_per_node": 2 if parallel else 1},
        }
    )  # fmt: skip


def prepare(options: argparse.Namespace) -> None:
    """Write the graphs of a layout."""
    import onnx
    from step import Config, Sizes, build, graphs_of

    folder = Path(options.folder) / options.prepare
    folder.mkdir(parents=True)
    sizes = {name: getattr(options, name) for name in vars(Sizes(0, 0, 0, 0, 0))}
    onnx.save(build(Config(**sizes)), folder / "model.onnx")
    spec, lengths = spec_of(options, options.prepare), dict.fromkeys(("tokens", "labels"), options.context)
    graphs_of(spec, folder, on_gpus=True, lengths=lengths if spec.parallel.sequence_parallel else None)


class Ortflow:
    """A step of ortflow's trainer under a layout."""

    def __init__(self, options: argparse.Namespace, name: str, comm: Any, device: Any) -> None:
        from safetensors.numpy import load_file
        from step import RATE

        from ortflow.workflow.graph.types import GraphSet
        from ortflow.workflow.kernels.library import library_for
        from ortflow.workflow.sessions.session import Sessions
        from ortflow.workflow.trainer import Report
        from ortflow.workflow.trainer.divided_opening import open_divided
        from ortflow.workflow.trainer.opening import open_trainer

        spec = spec_of(options, name)
        graphs = GraphSet.load(Path(options.folder) / name / "graphs")
        report = Report(lambda line: print(line, file=sys.stderr, flush=True))
        library = library_for(spec.kernels)
        sessions = Sessions(device, 4, "error", library.path if library else None)
        if spec.divides:
            self._trainer: Any = open_divided(graphs, spec, sessions, comm, report)
        else:
            self._trainer = open_trainer(graphs, spec, sessions, comm, report)
            self._trainer.load_tensors(load_file(graphs.initial))
        self._rate, self._update = RATE, 0

    def __call__(self, given: Batches) -> float:
        """The loss before the update."""
        from ortflow.workflow.trainer import MicroBatch

        self._update += 1
        made = [MicroBatch({"tokens": tokens, "labels": labels}, len(labels)) for tokens, labels in given]
        outcome = self._trainer.step(
            made, learning_rate=self._rate, update=self._update, seeds=[0] * len(made), control_values=()
        )
        return float(outcome.loss)


def peer(sizes: Any, rank: int, folder: Path, name: str, first: int) -> Step:
    """A step of PyTorch's."""
    import torch
    import torch_divided
    from safetensors.numpy import load_file
    from step import CLIP, DECAY, RATE

    # The weights of any of ortflow's layouts: all are made alike.
    weights, device = load_file(next(folder.glob("*/graphs/initial.safetensors"))), torch.device("cuda", rank)
    compiled, flags = name.endswith("compiled"), {"rate": RATE, "weight_decay": DECAY, "clip": CLIP}
    if name in PIPELINES:
        how = name.split()[1]
        return torch_divided.Pipelining(sizes, weights, device, how, first, compiled=compiled, **flags)
    return torch_divided.TensorParallel(sizes, weights, device, compiled=compiled, **flags)


def meeting(folder: str, name: str) -> Path:
    """The file through which the ranks of a candidate find each other, which must be new."""
    return Path(folder) / name.replace(" ", "-") / "torch"


def start(name: str, ranks: int, folder: str, words: Sequence[str], limit: float) -> dict[str, Any]:
    """Measure a candidate in processes of its own; what rank 0 prints last, or the error."""
    meeting(folder, name).parent.mkdir(exist_ok=True)
    meeting(folder, name).unlink(missing_ok=True)
    try:
        return measured(__file__, [*words, "--measure", name, "--folder", folder], ranks, limit)
    except Failed as failed:
        return {"error": str(failed)}


def prepare_all(options: argparse.Namespace, folder: str, words: Sequence[str]) -> None:
    """Write the graphs of all layouts that the folder lacks, at the same time."""
    names = [each for each in (ALONE, *options.layouts) if not (Path(folder) / each).exists()]
    started = [
        subprocess.Popen([sys.executable, __file__, "--prepare", name, *words, "--folder", folder]) for name in names
    ]
    codes = [each.wait() for each in started]
    if any(codes):
        raise SystemExit("the graphs of a layout cannot be made")


def table(found: dict[str, dict[str, Any]], options: argparse.Namespace) -> None:
    """Print the results. SystemExit if losses differ."""
    alone, tokens = found[ALONE], options.batch * options.context
    if "error" in alone:
        raise SystemExit(f"{ALONE}: {alone['error']}")
    print(f"{alone['gpu']}, torch {alone['torch']}, {tokens} tokens a micro-batch")
    rates: dict[str, dict[str, float]] = {}
    for name, each in found.items():
        if "error" in each:
            print(f"{name:22} failed: {each['error']}")
            continue
        apart = max(abs(a - b) / b for a, b in zip(each["losses"], alone["losses"], strict=True))
        rates[name] = {micro: int(micro) * tokens / seconds for micro, seconds in each["seconds"].items()}
        for micro, seconds in each["seconds"].items():
            idle = 1 - alone["seconds"][micro] / 2 / seconds
            print(
                f"{name:22} {micro:>3} micro-batches {rates[name][micro]:10,.0f} tokens a second"
                + f" {1e3 * seconds:8.2f} ms"
                + (f"  idle {idle:6.3f}" if name != ALONE else "")
                + (f" (formula {1 / (int(micro) + 1):.3f})" if "pipeline" in LAYOUTS.get(name, {}) else "")
                + f"  {each['gib']} GiB on the GPU, losses {apart:.1e} from one GPU's"
            )
        if not apart < AGREEMENT:
            raise SystemExit(f"the losses differ, so the times mean nothing: {each['losses']}, {alone['losses']}")
    for name in filter(rates.__contains__, options.layouts):
        peers = PIPELINES if "pipeline" in LAYOUTS[name] else [each for each in PEERS if each not in PIPELINES]
        for micro, rate in rates[name].items():
            theirs = {each: rates[each][micro] for each in peers if micro in rates.get(each, {})}
            if theirs:
                best = max(theirs, key=theirs.__getitem__)
                print(f"{name} / {best}, {micro} micro-batches = {rate / theirs[best]:.2f}")
    if any("error" in each for each in found.values()):
        raise SystemExit(1)


def main() -> None:
    """Measure one and two GPUs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = (("layers", 12), ("width", 768), ("heads", 12), ("context", 1024), ("vocabulary", 50304))
    for name, value in (*sizes, ("batch", 8), ("rounds", 6)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--micro", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--layouts", nargs="*", choices=[*LAYOUTS], default=[*LAYOUTS])
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=PEERS)
    parser.add_argument("--peer-layers", type=int, help="layers of PyTorch's first stage")
    parser.add_argument("--limit", type=float, default=300, help="seconds for each candidate")
    parser.add_argument("--folder", help="folder for the graphs, which a later call uses again")
    parser.add_argument("--only-prepare", action="store_true", help="write the graphs into --folder and leave")
    for hidden in ("--measure", "--prepare"):
        parser.add_argument(hidden, nargs="?", const=True, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.prepare:
        prepare(options)
    elif options.measure:
        measure(options)
    else:
        with tempfile.TemporaryDirectory() as temporary:
            compare(options, str(Path(options.folder or temporary).absolute()))


def compare(options: argparse.Namespace, folder: str) -> None:
    """Measure all candidates, and print the table."""
    prepare_all(options, folder, sys.argv[1:])
    if options.only_prepare:
        return
    found: dict[str, dict[str, Any]] = {}
    for name in (ALONE, *options.layouts, *options.peers):
        found[name] = start(name, 1 if name == ALONE else 2, folder, sys.argv[1:], options.limit)
        print(f"{name}: {found[name]}", file=sys.stderr, flush=True)
    table(found, options)


if __name__ == "__main__":
    main()
