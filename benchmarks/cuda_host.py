"""What a step on an NVIDIA GPU takes if the host works between two steps: ortflow against PyTorch.

    python benchmarks/cuda_host.py [--work 0 1 2 5 10 20 --layers 12 --width 768 --heads 12 --context 1024
        --vocabulary 50304 --batch 8 --rounds 30 --compile]

A run's host writes events and scalars, counts tokens and reads the data, on a file system that may be slow. Here it
sleeps for so many milliseconds behind each loss. GPT-2 in bf16, AdamW, clipping, every loss read by the host: ortflow,
whose next step has begun then; ortflow without that; PyTorch, which reads `loss.item()`, eager or, with `--compile`, by
torch.compile. Prints medians, and PyTorch's time over ortflow's. The losses of the first steps must agree.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

BATCHES = 8
WARM = 8
AGREEMENT = 1e-2
"""Largest relative difference of the losses of the first steps: bf16 on both sides."""


def timed(steps: Iterator[float], work: float, rounds: int) -> float:
    """Median seconds of a step with so many seconds of work behind each loss."""
    seconds = []
    next(steps)
    for _ in range(rounds):
        begun = time.perf_counter()
        if work:
            time.sleep(work)
        next(steps)
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


def main() -> None:
    """Build, check, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes_of = {"layers": 12, "width": 768, "heads": 12, "context": 1024, "vocabulary": 50304}
    for name, value in {**sizes_of, "batch": 8, "rounds": 30}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--work", type=float, nargs="+", default=[0, 1, 2, 5, 10, 20], help="milliseconds")
    parser.add_argument("--compile", action="store_true", help="PyTorch by torch.compile")
    options = parser.parse_args()

    import torch
    from safetensors.numpy import load_file
    from step import CLIP, DECAY, RATE, Config, OrtflowStep, Sizes, TorchStep, batches, make_graphs

    from ortflow.workflow.device.choice import cuda_runtime
    from ortflow.workflow.device.cuda import CudaDevice

    torch.set_float32_matmul_precision("high")
    sizes: dict[str, Any] = {name: getattr(options, name) for name in sizes_of}
    config, runtime = Config(**sizes), cuda_runtime()
    device = CudaDevice(runtime, runtime.describe(0), precision="bf16")
    times: dict[str, dict[float, float]] = {}
    losses: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        graphs, spec = make_graphs(config, options.batch, Path(folder), on_gpus=True, precision="bf16")

        def ours(begins: bool) -> tuple[Iterator[float], Callable[[], None]]:
            made = OrtflowStep(graphs, spec, 4, None, device)
            steps = made.over(({"tokens": tokens, "labels": labels} for tokens, labels in data()), begins=begins)

            def close() -> None:
                steps.close()  # type: ignore[attr-defined]
                made.close()

            return steps, close

        def theirs() -> tuple[Iterator[float], Callable[[], None]]:
            made = TorchStep(
                Sizes(**sizes), load_file(graphs.initial), rate=RATE, weight_decay=DECAY, clip=CLIP,
                compiled=options.compile, device="cuda", precision="bf16",
            )  # fmt: skip
            return itertools.starmap(made, data()), torch.cuda.empty_cache

        def data() -> Iterator[Any]:
            return itertools.cycle(list(itertools.islice(batches(config, options.batch), BATCHES)))

        peer = "torch.compile" if options.compile else "torch eager"
        candidates = {"ortflow": lambda: ours(True), "ortflow, one by one": lambda: ours(False), peer: theirs}
        for name, open_ in candidates.items():
            steps, close = open_()
            losses[name] = [next(steps) for _ in range(WARM)]
            times[name] = {work: timed(steps, work / 1e3, options.rounds) for work in options.work}
            close()
    print(f"{device.gpu.name}, torch {torch.__version__}, {options.batch} x {options.context} tokens, ms a step")
    for work in options.work:
        words = "  ".join(f"{name} {1e3 * times[name][work]:7.2f}" for name in times)
        print(f"{work:5g} ms of work  {words}  ratio {times[peer][work] / times['ortflow'][work]:.2f}")
    for name, found in losses.items():
        apart = max(abs(a - b) / b for a, b in zip(losses["ortflow"], found, strict=True))
        if not apart < AGREEMENT:
            raise SystemExit(f"the losses of {name} differ by {apart:.2g}, so the times mean nothing")


if __name__ == "__main__":
    main()
