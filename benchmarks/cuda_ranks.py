"""On several NVIDIA GPUs of one machine: ortflow against PyTorch's DistributedDataParallel, and NCCL through each.

    python benchmarks/cuda_ranks.py speed [--ranks 2 --layers 12 --width 768 --heads 12 --context 1024
        --vocabulary 50304 --batch 8 --rounds 20 --others]
    python benchmarks/cuda_ranks.py sums [--ranks 2 --rounds 20]

`speed` trains the GPT of cuda.py in bf16 with one rank and with several, each with micro-batches of `--batch` samples
of its own, AdamW, clipping, the host waiting for each loss. It prints tokens a second of all ranks and the scaling:
that of several over that of one times their number. `--others` also measures ortflow with buckets summed by NCCL in
place of copies between the GPUs, and with one sum behind the backward pass. The losses of the first steps must agree.
`sums` measures an all-reduce of 1 MiB to 1 GiB of fp32 through ortflow's communicator and through torch.distributed, by
turns, the medians of rounds: the time of CALLS in a row. mpirun of the environment's MPI starts the ranks.
"""

from __future__ import annotations

import argparse
import itertools
import json
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

from candidate import Failed, leave, measured

BATCHES = 8
"""Different batches of each rank."""
CALLS = 10
SIZES = [1 << power for power in (20, 22, 24, 26, 28, 30)]
"""Bytes."""
AGREEMENT = 1e-2
"""Largest relative difference of the losses of the first steps: bf16 on both sides."""
MODEL = ("layers", "width", "heads", "context", "vocabulary", "batch", "rounds")


def start(what: str, ranks: int, options: argparse.Namespace, *words: str) -> dict[str, Any]:
    """Run this program on so many ranks; what rank 0 printed last. SystemExit if they fail."""
    numbers = [word for name in MODEL for word in (f"--{name}", str(getattr(options, name)))]
    with tempfile.TemporaryDirectory() as folder:
        try:
            return measured(__file__, [what, *numbers, "--folder", folder, *words], ranks, options.limit)
        except Failed as failed:
            raise SystemExit(f"{what} on {ranks} rank(s) {failed}") from None


def world_of() -> tuple[Any, Any, str]:
    """The communicator over the ranks' GPUs, the device of this rank (bf16), and what sums."""
    from ortflow.workflow.comm.mpi import MpiCommunicator
    from ortflow.workflow.comm.over_gpus import over_gpus
    from ortflow.workflow.comm.solo import SoloCommunicator
    from ortflow.workflow.device.choice import cuda_runtime
    from ortflow.workflow.device.cuda import CudaDevice

    below = MpiCommunicator()
    found = cuda_runtime()
    device = CudaDevice(found, found.describe(below.rank), precision="bf16")
    if below.world_size == 1:
        return SoloCommunicator(), device, "one rank"
    comm, means = over_gpus(below, device, socket.gethostname(), 60)
    return comm, device, means


def connect_torch(comm: Any, folder: str) -> None:
    """torch.distributed over the same ranks."""
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(comm.rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{folder}/torch", rank=comm.rank, world_size=comm.world_size,
        device_id=torch.device("cuda", comm.rank),
    )  # fmt: skip


def measure_speed(options: argparse.Namespace) -> None:
    """What each rank does for `speed`; rank 0 prints seconds of a step and first losses."""
    import numpy as np
    import torch
    from safetensors.numpy import load_file
    from step import CLIP, DECAY, RATE, Config, OrtflowStep, Sizes, TorchStep, batches, make_graphs

    from ortflow.workflow.trainer import overlap, queued_work

    comm, device, means = world_of()
    config = Config(**{name: getattr(options, name) for name in vars(Sizes(0, 0, 0, 0, 0))})
    sizes = Sizes(**{name: getattr(options, name) for name in vars(Sizes(0, 0, 0, 0, 0))})
    place = Path(options.folder) / f"rank-{comm.rank}"
    place.mkdir()
    graphs, spec = make_graphs(config, options.batch, place, on_gpus=True, precision="bf16")
    torch.set_float32_matmul_precision("high")
    torch.cuda.set_device(comm.rank)

    def mine(patched: Any = nullcontext()) -> Callable[..., float]:  # noqa: B008 - it has no state
        with patched:
            return OrtflowStep(graphs, spec, 4, None, device, communicator=comm)

    def peer() -> Callable[..., float]:
        if comm.world_size > 1:
            connect_torch(comm, options.folder)
        weights = load_file(graphs.initial)
        return TorchStep(
            sizes, weights, rate=RATE, weight_decay=DECAY, clip=CLIP, compiled=True, device=f"cuda:{comm.rank}",
            precision="bf16", distributed=comm.world_size > 1,
        )  # fmt: skip

    candidates: dict[str, Callable[[], Callable[..., float]]] = {"ortflow": mine}
    if options.others and comm.world_size > 1:
        candidates["ortflow, NCCL"] = lambda: mine(mock.patch.object(overlap, "peer_sums", return_value="off"))
        candidates["ortflow, one sum"] = lambda: mine(mock.patch.object(queued_work, "overlapped", return_value=None))
    if not options.no_peers:
        candidates["torch.compile"] = peer
    found: dict[str, Any] = {"sums": means, "gpu": device.gpu.name, "torch": torch.__version__}
    for name, make in candidates.items():
        # Each rank has batches of its own, each candidate the same ones.
        made = itertools.cycle(list(itertools.islice(batches(config, options.batch, seed=comm.rank), BATCHES)))
        step = make()
        if isinstance(step, OrtflowStep):
            steps = step.over({"tokens": tokens, "labels": labels} for tokens, labels in made)
        else:
            steps = itertools.starmap(step, made)
        losses = [next(steps) for _ in range(5)]
        if name == "torch.compile":
            every = comm.below.gather(losses) if comm.world_size > 1 else [losses]
            losses = [sum(each) / len(each) for each in zip(*every, strict=True)] if every else []
        seconds = []
        for _ in range(options.rounds):
            begun = time.perf_counter()
            next(steps)
            seconds.append(time.perf_counter() - begun)
        found[name] = {"seconds": statistics.median(seconds), "losses": losses}
        print(
            f"{comm.world_size} rank(s), {name}: {1e3 * statistics.median(seconds):.2f} ms", file=sys.stderr, flush=True
        )
        if isinstance(step, OrtflowStep):
            steps.close()
            step.close()
        device.memory_moves()
        del step, steps
        torch.cuda.empty_cache()
    if comm.rank == 0:
        finite = all(np.isfinite(each["losses"]).all() for each in found.values() if isinstance(each, dict))
        print(json.dumps({**found, "finite": bool(finite)}), flush=True)
    leave(comm.barrier)


def speed(options: argparse.Namespace) -> None:
    """Print the table; SystemExit where losses differ."""
    words = [*(["--others"] if options.others else []), *(["--no-peers"] if options.no_peers else [])]
    one = start("measure-speed", 1, options, *words)
    many = start("measure-speed", options.ranks, options, *words)
    print(f"{many['gpu']}, torch {many['torch']}, {many['sums']}, {options.batch} x {options.context} tokens a rank")
    tokens, rates = options.batch * options.context, {}
    for name, found in many.items():
        if not isinstance(found, dict):
            continue
        alone = one.get(name, one["ortflow"])
        rates[name] = options.ranks * tokens / found["seconds"]
        scaling = alone["seconds"] / found["seconds"]
        print(
            f"{name:20} 1 GPU {tokens / alone['seconds']:10,.0f}  {options.ranks} GPUs {rates[name]:12,.0f} tokens a "
            f"second  {1e3 * found['seconds']:7.2f} ms a step  scaling {scaling:.3f}"
        )
        apart = max(abs(a - b) / b for a, b in zip(found["losses"], many["ortflow"]["losses"], strict=True))
        if not (many["finite"] and one["finite"] and apart < AGREEMENT):
            raise SystemExit(f"the losses differ, so the times mean nothing: {found['losses']}, {many['ortflow']}")
    if "torch.compile" in rates:
        print(f"ortflow / torch.compile on {options.ranks} GPUs = {rates['ortflow'] / rates['torch.compile']:.2f}")


def measure_sums(options: argparse.Namespace) -> None:
    """What each rank does for `sums`."""
    import numpy as np
    import torch
    import torch.distributed as dist

    comm, device, means = world_of()
    connect_torch(comm, options.folder)
    found: dict[str, Any] = {"sums": means, "gpu": device.gpu.name, "torch": torch.__version__}
    for size in SIZES:
        buffer = device.allocate(size // 4, np.float32)
        tensor = torch.zeros(size // 4, device=f"cuda:{comm.rank}")
        buffer.write(np.full(size // 4, comm.rank + 1, np.float32))
        comm.all_reduce(buffer)
        expected = comm.world_size * (comm.world_size + 1) / 2
        if not (buffer.read() == expected).all():
            raise SystemExit(f"an all-reduce of {size} bytes gives {buffer.slice(0, 4).read()}, not {expected}")
        buffer.fill(0)

        def mine(buffer: Any = buffer) -> None:
            for _ in range(CALLS):
                comm.all_reduce(buffer)
            device.synchronize()

        def peer(tensor: Any = tensor) -> None:
            for _ in range(CALLS):
                dist.all_reduce(tensor)
            torch.cuda.synchronize()

        seconds: dict[str, list[float]] = {"ortflow": [], "torch.distributed": []}
        for turn in range(options.rounds + 2):
            for name, call in (("ortflow", mine), ("torch.distributed", peer)):
                comm.barrier()
                begun = time.perf_counter()
                call()
                if turn >= 2:
                    seconds[name].append((time.perf_counter() - begun) / CALLS)
        found[str(size)] = {name: statistics.median(each) for name, each in seconds.items()}
    if comm.rank == 0:
        print(json.dumps(found), flush=True)
    leave(comm.barrier)


def sums(options: argparse.Namespace) -> None:
    """Print the table."""
    found = start("measure-sums", options.ranks, options)
    print(f"{found['gpu']}, torch {found['torch']}, {options.ranks} ranks, {found['sums']}, fp32")
    for size in SIZES:
        times = found[str(size)]
        rates = {name: 2 * (options.ranks - 1) / options.ranks * size / each / 1e9 for name, each in times.items()}
        words = "  ".join(f"{name} {1e6 * times[name]:9.1f} us, {rates[name]:6.1f} GB/s" for name in times)
        print(f"{size >> 20:5} MiB  {words}  ratio {times['torch.distributed'] / times['ortflow']:.3f}")


def main() -> None:
    """Speed or sums, or what a rank does for them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    work = {"speed": speed, "sums": sums, "measure-speed": measure_speed, "measure-sums": measure_sums}
    parser.add_argument("what", choices=list(work))
    for name, value in (("layers", 12), ("width", 768), ("heads", 12), ("context", 1024), ("vocabulary", 50304)):
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, value in (("batch", 8), ("rounds", 20), ("ranks", 2), ("limit", 600)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--others", action="store_true", help="also with NCCL's buckets, and with one sum")
    parser.add_argument("--no-peers", action="store_true", help="leave PyTorch out")
    parser.add_argument("--folder", help="used by the ranks")
    options = parser.parse_args()
    work[options.what](options)


if __name__ == "__main__":
    main()
