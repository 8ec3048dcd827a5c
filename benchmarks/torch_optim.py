"""Seconds of an optimizer step on the parameters of GPT-2 small, ortflow's against torch.optim's, in one process.

`python benchmarks/torch_optim.py [--threads 1 2] [--layers 12]`: medians of rounds in which the optimizers alternate.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from ortflow.torch.optim import SGD, FusedAdam, Lamb


def parameters(layers: int, width: int = 768) -> list[torch.nn.Parameter]:
    """Parameters of GPT-2's shapes, with gradients."""
    block = [(width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,), (width,), (width,)]
    block += [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    shapes = [(50257, width), (1024, width), *block * layers, (width,), (width,)]
    found = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    for parameter in found:
        parameter.grad = torch.randn_like(parameter)
    return found


def main() -> None:
    """Print a line for each optimizer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    shared = parameters(asked.layers)
    builds = {
        "FusedAdam": lambda p: FusedAdam(p, adam_w_mode=2),
        "torch AdamW(fused)": lambda p: torch.optim.AdamW(p, fused=True),
        "torch AdamW(foreach)": lambda p: torch.optim.AdamW(p, foreach=True),
        "Lamb": Lamb,
        "SGD": lambda p: SGD(p, momentum=0.9),
        "torch SGD(fused)": lambda p: torch.optim.SGD(p, momentum=0.9, fused=True),
        "torch SGD(foreach)": lambda p: torch.optim.SGD(p, momentum=0.9, foreach=True),
    }
    print(f"{sum(parameter.numel() for parameter in shared) / 1e6:.0f} M parameters, {len(shared)} tensors")
    for threads in asked.threads:
        torch.set_num_threads(threads)
        optimizers = {name: build(shared) for name, build in builds.items()}
        seconds: dict[str, list[float]] = {name: [] for name in optimizers}
        for _ in range(asked.rounds + 1):
            for name, optimizer in optimizers.items():
                begin = time.perf_counter()
                optimizer.step()
                seconds[name].append(time.perf_counter() - begin)
        for name, each in seconds.items():
            print(f"{threads} threads  {name:22} {statistics.median(each[1:]) * 1000:8.1f} ms")


if __name__ == "__main__":
    main()
