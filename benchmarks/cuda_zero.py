"""ZeRO and off-loading on NVIDIA GPUs: time of a step and memory of a rank, against stage 0 and PyTorch's FSDP2.

    python benchmarks/cuda_zero.py [--ranks 2 --layers 12 --width 768 --heads 12 --context 1024 --vocabulary 50304
        --batch 8 --accumulation 1 --rounds 20 --only NAME ...]

Trains the GPT of cuda.py in bf16 with AdamW and clipping, the host waiting for each loss, every candidate in processes
of its own on the same ranks:

- `zero 0`, `zero 1`, `zero 2`: ortflow under each stage; `zero 0, one sum`: without buckets, as the other stages sum
- `offload`, `offload zero 1`: moments in host memory
- `fsdp2`, `fsdp2 compiled`: fully_shard of each block, parameters in bf16, gradients reduced in fp32, no resharding
  between the passes (what stage 2 shards), eager and with each block compiled; not with accumulation
- `update on the CPU`: copies of the gradients and parameters of a rank, and ortflow's multi-threaded AdamW on them:
  what off-loading would add to a step if the host did the update

Losses of the first steps must agree. Memory is the most that a rank used beyond its CUDA context, for ortflow beside
the formula's difference from stage 0. The last lines are ratios; above 1, the first is slower.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from candidate import Failed, leave, measured

AGREEMENT = 1e-2
"""Largest relative difference of the losses of the first steps: bf16 on both sides."""
FIRST, LOSSES = 6, 5
"""Steps before the timed ones, in which graphs are captured, and losses that are compared."""
SIZES = ("layers", "width", "heads", "context", "vocabulary")
NUMBERS = (*SIZES, "batch", "accumulation", "rounds")
OURS: dict[str, dict[str, Any]] = {
    "zero 0": {}, "zero 0, one sum": {"whole": True}, "zero 1": {"zero": 1}, "zero 2": {"zero": 2},
    "offload": {"offload": "optimizer"}, "offload zero 1": {"zero": 1, "offload": "optimizer"},
}  # fmt: skip
PEERS = ("fsdp2", "fsdp2 compiled")
ON_CPU = "update on the CPU"
STATE = ("parameters", "gradients", "moments")


def start(name: str, options: argparse.Namespace, folder: str) -> dict[str, Any] | None:
    """Measure a candidate on all ranks; what rank 0 printed last, None if it failed."""
    numbers = [word for each in NUMBERS for word in (f"--{each}", str(getattr(options, each)))]
    ranks = 1 if name == ON_CPU else options.ranks
    begun = time.perf_counter()
    try:
        found = measured(__file__, ["--measure", name, "--folder", folder, *numbers], ranks, options.limit)
    except Failed as failed:
        print(f"{name}: {failed}", flush=True)
        return None
    print(f"{name}: {1e3 * found['seconds']:.2f} ms, measured in {time.perf_counter() - begun:.0f} s", flush=True)
    return found


def make(options: argparse.Namespace, folder: Path) -> None:
    """The graphs of all candidates."""
    from step import Config, make_graphs

    config = Config(**{name: getattr(options, name) for name in SIZES})
    _, spec = make_graphs(config, options.batch, folder, on_gpus=True, precision="bf16")
    (folder / "spec.json").write_text(spec.model_dump_json(exclude_unset=True))


def tokens(options: argparse.Namespace, rank: int) -> Iterator[tuple[Any, Any]]:
    """Micro-batches of a rank."""
    from step import Config, batches

    return batches(Config(**{name: getattr(options, name) for name in SIZES}), options.batch, seed=rank)


def world_of() -> tuple[Any, Any]:
    """The communicator over the ranks' GPUs, and the device of this rank."""
    import socket

    from ortflow.workflow.comm.mpi import MpiCommunicator
    from ortflow.workflow.comm.over_gpus import over_gpus
    from ortflow.workflow.comm.solo import SoloCommunicator
    from ortflow.workflow.device.choice import cuda_runtime
    from ortflow.workflow.device.cuda import CudaDevice

    below = MpiCommunicator()
    found = cuda_runtime()
    device = CudaDevice(found, found.describe(below.rank), precision="bf16")
    if below.world_size == 1:
        return SoloCommunicator(), device
    return over_gpus(below, device, socket.gethostname(), 60)[0], device


def timed(step: Callable[[], float], rounds: int) -> tuple[float, list[float]]:
    """Median seconds of a step, and the first losses."""
    losses = [step() for _ in range(FIRST)]
    seconds = []
    for _ in range(rounds):
        begun = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds), losses[:LOSSES]


def ours(options: argparse.Namespace, changes: dict[str, Any]) -> dict[str, Any]:
    """A rank of ortflow."""
    from safetensors.numpy import load_file
    from step import RATE

    from ortflow.workflow.graph.types import GraphSet
    from ortflow.workflow.sessions.session import Sessions
    from ortflow.workflow.spec.run import TrainerRunSpec
    from ortflow.workflow.trainer import MicroBatch, Report, queued_work
    from ortflow.workflow.trainer.opening import open_trainer

    comm, device = world_of()
    folder = Path(options.folder)
    content = json.loads((folder / "spec.json").read_text())
    content["train"] |= {
        "gradient_accumulation": options.accumulation, "offload": changes.get("offload", "none"),
    }  # fmt: skip
    content["data"]["last_batch"] = "drop"
    content["resources"]["ranks_per_node"] = comm.world_size
    content["parallel"] = {"zero": changes.get("zero", 0)}
    spec, graphs = TrainerRunSpec.model_validate(content), GraphSet.load(folder / "graphs")
    sessions = Sessions(device, 4, "error", None)
    notes: list[str] = []
    if changes.get("whole"):
        assert queued_work.overlapped, "what makes buckets has another name"
        queued_work.overlapped = lambda *arguments: None
    trainer = open_trainer(graphs, spec, sessions, comm, Report(note=notes.append))
    trainer.load_tensors(load_file(graphs.initial))
    stream, updates = tokens(options, comm.rank), iter(range(1, 1 << 30))

    def step() -> float:
        given = [next(stream) for _ in range(options.accumulation)]
        batches = [MicroBatch({"tokens": each, "labels": labels}, len(each)) for each, labels in given]
        return trainer.step(
            batches, learning_rate=RATE, update=next(updates), seeds=[0] * len(batches), control_values=()
        ).loss

    seconds, losses = timed(step, options.rounds)
    for line in notes:
        print(f"{comm.rank}: {line}", file=sys.stderr, flush=True)
    parts = dict(trainer.memory())
    return {
        "rank": comm.rank, "seconds": seconds, "losses": losses, "peak": device.peak(), "gpu": device.gpu.name,
        "parts": parts, "held": device.held, "barrier": comm.barrier,
    }  # fmt: skip


def peer(options: argparse.Namespace, *, compiled: bool) -> dict[str, Any]:
    """A rank of PyTorch's."""
    import torch
    import torch.distributed as dist
    from safetensors.numpy import load_file
    from step import CLIP, DECAY, RATE
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch_gpt import Gpt, Sizes, load

    from ortflow.workflow.comm.mpi import MpiCommunicator

    comm = MpiCommunicator()
    torch.set_float32_matmul_precision("high")
    torch.cuda.set_device(comm.rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{options.folder}/torch-{int(compiled)}", rank=comm.rank,
        world_size=comm.world_size, device_id=torch.device("cuda", comm.rank),
    )  # fmt: skip
    free, _ = torch.cuda.mem_get_info()
    model = Gpt(Sizes(**{name: getattr(options, name) for name in SIZES}))
    load(model, load_file(Path(options.folder) / "graphs" / "initial.safetensors"))
    model.to(f"cuda:{comm.rank}")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.h:
        if compiled:
            block.compile()
        fully_shard(block, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mp_policy=policy, reshard_after_forward=False)
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, fused=True)
    stream = tokens(options, comm.rank)

    def step() -> float:
        loss = model(*(torch.from_numpy(array).to("cuda") for array in next(stream)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    seconds, losses = timed(step, options.rounds)
    every = comm.gather(losses)
    means = [sum(each) / len(each) for each in zip(*every, strict=True)] if every else losses
    used = free - torch.cuda.mem_get_info()[0]
    return {
        "rank": comm.rank, "seconds": seconds, "losses": means, "peak": used, "torch": torch.__version__,
        "barrier": comm.barrier,
    }  # fmt: skip


def on_the_cpu(options: argparse.Namespace) -> dict[str, Any]:
    """Gradients to the host, ortflow's AdamW of the CPU, parameters back, in turn; moments never move."""
    from ortflow.workflow.device.cpu import CpuDevice
    from ortflow.workflow.device.pinned import PinnedBuffer
    from ortflow.workflow.graph.autodiff.compose import compose
    from ortflow.workflow.graph.types import GraphSet
    from ortflow.workflow.kernels.graph import with_kernels
    from ortflow.workflow.kernels.library import find_library
    from ortflow.workflow.optim.graph import optimizer_graph
    from ortflow.workflow.optim.segments import segments
    from ortflow.workflow.sessions.binding import Binding
    from ortflow.workflow.sessions.session import Sessions
    from ortflow.workflow.spec.run import TrainerRunSpec

    _, gpu = world_of()
    folder = Path(options.folder)
    spec = TrainerRunSpec.model_validate_json((folder / "spec.json").read_text())
    index, library, cpu = GraphSet.load(folder / "graphs").index, find_library(), CpuDevice()
    if library.path is None:
        raise SystemExit(f"the update on the CPU needs ortflow's kernels: {library.note}")
    threads = len(os.sched_getaffinity(0)) // options.ranks
    cuts = segments(spec.train.optimizer, index)
    graph = with_kernels(optimizer_graph(spec.train.optimizer, cuts, kernels=True))
    session = Sessions(cpu, threads, "error", library.path).open(compose(graph).SerializeToString())
    update = Binding(session, cpu)
    count = index.trained
    here = {name: PinnedBuffer.zeros(gpu, count, np.float32) for name in ("parameters", "gradients")}
    here |= {name: cpu.allocate(count, np.float32) for name in ("moment_1", "moment_2")}
    rate, number = cpu.allocate(1, np.float32), cpu.allocate(1, np.int64)
    rate.fill(1e-3)
    number.fill(1)
    update.read_from("learning_rate", rate, (1,))
    update.read_from("step", number, (1,))
    for place, piece in enumerate(cuts):
        for name, buffer in here.items():
            part, value = buffer.slice(piece.start, piece.stop), f"{name}.{place}"
            update.read_from(value, part, (piece.count,))
            if f"{value}.out" in update.outputs:
                update.write_to(f"{value}.out", part, (piece.count,))
    there = {name: gpu.allocate(count, np.float32) for name in ("parameters", "gradients")}
    there["gradients"].write(np.full(count, 1e-3, np.float32))
    runtime = gpu.here()

    def step() -> float:
        runtime.copy(here["gradients"].pointer, there["gradients"].pointer, 4 * count, 2, gpu.stream)
        gpu.synchronize()
        update.run()
        runtime.copy(there["parameters"].pointer, here["parameters"].pointer, 4 * count, 1, gpu.stream)
        gpu.synchronize()
        return 0.0

    seconds, losses = timed(step, options.rounds)
    if not there["parameters"].read().any():
        raise SystemExit("the update on the CPU changed nothing")
    return {"rank": 0, "seconds": seconds, "losses": losses, "threads": threads, "peak": 0, "barrier": lambda: None}


def measure(options: argparse.Namespace) -> None:
    """What each rank does for a candidate; rank 0 prints it."""
    name = options.measure
    if name in OURS:
        found = ours(options, OURS[name])
    elif name == ON_CPU:
        found = on_the_cpu(options)
    else:
        found = peer(options, compiled=name.endswith("compiled"))
    barrier = found.pop("barrier")
    if found.pop("rank") == 0:
        print(json.dumps(found), flush=True)
    leave(barrier)


def main() -> None:
    """Measure the candidates in turn; print the table and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("layers", 12), ("width", 768), ("heads", 12), ("context", 1024), ("vocabulary", 50304)):
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, value in (("batch", 8), ("accumulation", 1), ("rounds", 20), ("ranks", 2), ("limit", 300)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--only", nargs="*", choices=[*OURS, *PEERS, ON_CPU], help="candidates")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options)
        return
    names = options.only or [*OURS, *(PEERS if options.accumulation == 1 else ()), ON_CPU]
    with tempfile.TemporaryDirectory() as folder:
        make(options, Path(folder))
        found = {name: each for name in names if (each := start(name, options, folder)) is not None}
    report(options, found)


def report(options: argparse.Namespace, found: dict[str, dict[str, Any]]) -> None:
    """Print; SystemExit where losses differ."""
    plain = found.get("zero 0")
    for name, each in found.items():
        line = f"{name:18} {1e3 * each['seconds']:8.2f} ms a step"
        if each["peak"]:
            line += f"  {each['peak'] / 1e6:8.0f} MB at most"
        if name in OURS:
            state = sum(each["parts"][part] for part in STATE)
            line += f"  {each['held'] / 1e6:8.0f} MB of buffers, {state / 1e6:.0f} by the formula"
            if plain is not None and each is not plain:
                formula = sum(plain["parts"][part] for part in STATE) - state
                less = plain["peak"] - each["peak"]
                line += f"; at most less than stage 0: {less / 1e6:.0f} MB, formula {formula / 1e6:.0f}"
        print(line)
    base = next((each for name, each in found.items() if name in OURS), None)
    for name, each in found.items():
        if base is None or name == ON_CPU:
            continue
        apart = max(abs(a - b) / b for a, b in zip(each["losses"], base["losses"], strict=True))
        if not apart < AGREEMENT:
            raise SystemExit(f"the losses differ, so the times mean nothing: {name} {each['losses']}, {base['losses']}")
    pairs = [(name, "zero 0") for name in OURS if name != "zero 0"]
    pairs += [("fsdp2", "zero 2"), ("fsdp2 compiled", "zero 2")]
    for one, other in pairs:
        if one in found and other in found:
            print(f"{one} / {other} = {found[one]['seconds'] / found[other]['seconds']:.3f}")


if __name__ == "__main__":
    main()
