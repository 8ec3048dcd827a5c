"""ZeRO 3 on NVIDIA GPUs: a Llama that does not fit on one of them within a budget, against PyTorch's FSDP2.

    python benchmarks/cuda_sharded.py prepare FOLDER [--layers 28 --width 3072 --inner 8192 --heads 24 --groups 8
        --context 2048 --vocabulary 32000 --batch 2 --ranks 2 --budget 40]
    python benchmarks/cuda_sharded.py measure FOLDER [--rounds 12 --only NAME ...]

`prepare`, on any machine, makes the graphs without weights (with `--only`, of some candidates), and predicts the memory
of a rank as `ortflow inspect --plan` does, of this layout and of a single rank. `measure` trains in bf16 with AdamW and
clipping, the host waiting for each loss, every candidate in processes of its own on the same ranks:

- `zero 3`, `zero 3, recompute`: ortflow; the second with `model.recompute: layers`
- `fsdp2`, `fsdp2, recompute`: fully_shard of each block, each compiled, parameters gathered in bf16 and gradients
  reduced in fp32; the second with a checkpoint around each block

Weights are drawn by every rank. Losses of the first steps must agree. Memory is the most that a rank used beyond its
CUDA context. The last lines are ratios of tokens a second and of memory; above 1, ortflow is faster, and needs more.
`--device cpu` rehearses the program with MPI and gloo, in fp32.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from candidate import Failed, leave, measured
from llama import Sizes, Weights, graphs_in, spec_of

AGREEMENT = 1e-2
"""Largest relative difference of the losses of the first steps: bf16 on both sides."""
CANDIDATES = ("zero 3", "zero 3, recompute", "fsdp2", "fsdp2, recompute")
GIGA = 1e9


def prepare(options: argparse.Namespace) -> None:
    """Graphs and predictions."""
    from ortflow.workflow.planning.forecast import activations, messages_of, shards_of
    from ortflow.workflow.planning.ranks import memory_of

    folder, sizes, gpus = Path(options.folder), sizes_of(options), options.device == "cuda"
    known = folder / "options.json"
    predicted: dict[str, Any] = json.loads(known.read_text())["predicted"] if known.exists() else {}
    for name, again in (("plain", None), ("recompute", "layers")):
        if f"zero 3{', recompute' if again else ''}" not in options.only:
            continue
        graphs = graphs_in(folder / name, sizes, spec_of(options.batch, options.ranks, 3, again, on_gpus=gpus))
        for line in graphs.notes:
            print(f"{name}: {line}")
        shapes = dict.fromkeys(("tokens", "labels"), (options.batch, options.context))
        size = 2 * 8 * options.batch * options.context
        for ranks, zero in ((options.ranks, 3), (1, 0)):
            spec = spec_of(options.batch, ranks, zero, again, on_gpus=gpus)
            shards = shards_of(graphs, spec)
            peak = activations(graphs, spec, shapes, shards)
            memory = memory_of(spec, graphs.index, peak, size, fetched=sum(messages_of(shards, graphs.index, spec)))
            predicted[f"{name}, {ranks}"] = {**memory.parts, "total": memory.total}
            parts = ", ".join(f"{part} {count / GIGA:.2f}" for part, count in memory.parts.items())
            fits = "fits in" if memory.total <= options.budget * GIGA else "does not fit in"
            print(f"predicted, {name}, {ranks} rank(s), ZeRO {zero}: {memory.total / GIGA:.1f} GB a rank, which {fits} "
                  f"{options.budget:g} GB ({parts})", flush=True)  # fmt: skip
    count = sum(int(np.prod(shape)) for shape in sizes.shapes().values())
    print(f"{count:,} parameters")
    kept = {name: getattr(options, name) for name in (*vars(sizes), "batch", "ranks", "budget", "device")}
    known.write_text(json.dumps({**kept, "predicted": predicted}))


def sizes_of(options: argparse.Namespace) -> Sizes:
    """Of the model."""
    return Sizes(**{name: getattr(options, name) for name in vars(Sizes())})


def tokens(options: argparse.Namespace, rank: int) -> Iterator[tuple[Any, Any]]:
    """Micro-batches of a rank: random windows and the same shifted by one."""
    random = np.random.default_rng(rank)
    while True:
        window = random.integers(0, options.vocabulary, (options.batch, options.context + 1))
        yield np.ascontiguousarray(window[:, :-1]), np.ascontiguousarray(window[:, 1:])


def ours(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """A rank of ortflow."""
    from cuda_zero import timed, world_of
    from step import RATE

    from ortflow.workflow.comm.mpi import MpiCommunicator
    from ortflow.workflow.device.cpu import CpuDevice
    from ortflow.workflow.graph.types import GraphSet
    from ortflow.workflow.kernels.library import find_library
    from ortflow.workflow.sessions.session import Sessions
    from ortflow.workflow.trainer import MicroBatch, Report
    from ortflow.workflow.trainer.opening import open_trainer

    again = "recompute" in name
    gpus = options.device == "cuda"
    comm, device = world_of() if gpus else (MpiCommunicator(), CpuDevice())
    graphs = GraphSet.load(Path(options.folder) / ("recompute" if again else "plain") / "graphs")
    spec = spec_of(options.batch, comm.world_size, 3, "layers" if again else None, on_gpus=gpus)
    sessions = Sessions(device, 4, "error", None if gpus else find_library().path)
    notes: list[str] = []
    trainer = open_trainer(graphs, spec, sessions, comm, Report(note=notes.append))
    begun = time.perf_counter()
    trainer.load_tensors(Weights(sizes_of(options)))
    notes.append(f"weights drawn in {time.perf_counter() - begun:.1f} s")
    stream, updates = tokens(options, comm.rank), iter(range(1, 1 << 30))

    def step() -> float:
        given, labels = next(stream)
        batch = MicroBatch({"tokens": given, "labels": labels}, len(given))
        return trainer.step([batch], learning_rate=RATE, update=next(updates), seeds=[0], control_values=()).loss

    seconds, losses = timed(step, options.rounds)
    for line in notes:
        print(f"{comm.rank}: {line}", file=sys.stderr, flush=True)
    measured = dict(trainer.device_memory())
    return {
        "rank": comm.rank, "seconds": seconds, "losses": losses, "peak": measured.get("gpu_peak", 0),
        "buffers": measured.get("gpu_buffers", 0), "parts": dict(trainer.memory()), "barrier": comm.barrier,
        "machine": device.gpu.name if gpus else "cpu",
    }  # fmt: skip


def peer(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """A rank of PyTorch's."""
    import torch
    import torch.distributed as dist
    from cuda_zero import timed
    from torch_llama import stepper

    from ortflow.workflow.comm.mpi import MpiCommunicator

    comm, gpus = MpiCommunicator(), options.device == "cuda"
    device = torch.device("cuda", comm.rank) if gpus else torch.device("cpu")
    free = 0
    if gpus:
        torch.set_float32_matmul_precision("high")
        torch.cuda.set_device(comm.rank)
        free, _ = torch.cuda.mem_get_info()
    store = f"file://{options.folder}/store-{time.time_ns() if comm.rank == 0 else 0}"
    dist.init_process_group(
        "nccl" if gpus else "gloo", init_method=comm.broadcast_object(store), rank=comm.rank,
        world_size=comm.world_size, **({"device_id": device} if gpus else {}),
    )  # fmt: skip
    again = "recompute" in name
    run = stepper(sizes_of(options), Weights(sizes_of(options)), device, compiled=gpus, again=again, half=gpus)
    stream = tokens(options, comm.rank)
    seconds, losses = timed(lambda: run(*next(stream)), options.rounds)
    every = comm.gather(losses)
    means = [sum(each) / len(each) for each in zip(*every, strict=True)] if every else losses
    used = free - torch.cuda.mem_get_info()[0] if gpus else 0
    allocated = torch.cuda.max_memory_allocated() if gpus else 0
    return {
        "rank": comm.rank, "seconds": seconds, "losses": means, "peak": used, "allocated": allocated,
        "torch": torch.__version__, "barrier": comm.barrier,
    }  # fmt: skip


def one(options: argparse.Namespace) -> None:
    """What each rank does for a candidate; rank 0 prints it."""
    name = options.one
    if name.startswith("zero"):
        faulthandler.dump_traceback_later(max(10, options.limit - 15), exit=False)
    found = ours(options, name) if name.startswith("zero") else peer(options, name)
    barrier = found.pop("barrier")
    if found.pop("rank") == 0:
        print(json.dumps(found), flush=True)
    leave(barrier)


def start(name: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """Measure a candidate on all ranks; what rank 0 printed last, None if it failed."""
    numbers = ["--rounds", str(options.rounds), "--limit", str(options.limit)]
    begun = time.perf_counter()
    try:
        found = measured(__file__, ["measure", options.folder, "--one", name, *numbers], options.ranks, options.limit)
    except Failed as failed:
        print(f"{name}: {failed}", flush=True)
        return None
    rate = options.ranks * options.batch * options.context / found["seconds"]
    print(
        f"{name}: {1e3 * found['seconds']:.1f} ms, {rate:,.0f} tokens a second, {found['peak'] / GIGA:.2f} GB, losses "
        f"{found['losses'][0]:.4f} to {found['losses'][-1]:.4f}, measured in {time.perf_counter() - begun:.0f} s",
        flush=True,
    )
    return found


def measure(options: argparse.Namespace) -> None:
    """Measure the candidates in turn; print the ratios. SystemExit where losses differ."""
    found = {name: each for name in options.only if (each := start(name, options)) is not None}
    for name in found:
        if name in ("zero 3", "zero 3, recompute"):
            plain = f"{'recompute' if 'recompute' in name else 'plain'}, {options.ranks}"
            print(f"{name}: predicted {options.predicted[plain]['total'] / GIGA:.2f} GB a rank")
    for ending in ("", ", recompute"):
        mine, other = found.get(f"zero 3{ending}"), found.get(f"fsdp2{ending}")
        if mine is None or other is None:
            continue
        spread = np.abs(np.array(mine["losses"]) / np.array(other["losses"]) - 1).max()
        print(f"zero 3 / fsdp2{ending}: tokens a second {other['seconds'] / mine['seconds']:.3f}, ", end="")
        print(f"memory {mine['peak'] / max(other['peak'], 1):.3f}, losses within {spread:.1e}", flush=True)
        if not spread <= AGREEMENT:
            raise SystemExit(f"the losses differ, so the times mean nothing: {mine['losses']}, {other['losses']}")


def main() -> None:
    """Prepare or measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["prepare", "measure"])
    parser.add_argument("folder")
    for name, value in {**vars(Sizes()), "batch": 2, "ranks": 2, "rounds": 12, "limit": 200}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--budget", type=float, default=40.0, help="GB of a GPU")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", nargs="*", choices=CANDIDATES, default=CANDIDATES, help="candidates")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.what == "prepare":
        prepare(options)
        return
    vars(options).update(json.loads((Path(options.folder) / "options.json").read_text()))
    if options.one:
        one(options)
    else:
        measure(options)


if __name__ == "__main__":
    main()
