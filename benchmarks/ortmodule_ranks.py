"""Time of a training step of ORTModule under DDP against DDP with torch.compile, a GPU for each rank.

    torchrun --standalone --nproc-per-node 2 benchmarks/ortmodule_ranks.py --models gpt --micro-batch 16

The user's own loop under autocast to bf16, with torch's fused AdamW. Variants alternate in the same processes; the
host waits for the GPU after `--steps` steps. Rank 0 prints a JSON line for each variant: the median of the rounds of
its slowest rank, for ORTModule the ratio to the fastest of the others, and the loss, which all must share.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import warnings
from typing import Any

import torch
import torch.distributed as dist
from ortmodule import Variant
from ortmodule_cases import BATCH, CASES
from torch.nn.parallel import DistributedDataParallel

from ortflow.torch import ORTModule


class RankVariant(Variant):
    """A module under DDP, timed by its slowest rank."""

    def time(self, count: int) -> None:
        """Seconds of a step, of `count` in a row."""
        dist.barrier()
        torch.cuda.synchronize()
        super().time(count)
        seconds = torch.tensor([self.seconds[-1]], device="cuda")
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        self.seconds[-1] = float(seconds.item())


def variant(name: str, module: torch.nn.Module, batch: tuple[Any, ...]) -> RankVariant:
    """The variant after its first steps."""
    own = copy.deepcopy(module)
    device = torch.cuda.current_device()
    run: Any
    if name == "ortmodule":
        run = DistributedDataParallel(ORTModule(own, cuda_graphs=True), [device], gradient_as_bucket_view=True)
    elif name == "compiled in DDP":
        run = DistributedDataParallel(torch.compile(own, dynamic=False), [device], gradient_as_bucket_view=True)
    else:
        run = torch.compile(DistributedDataParallel(own, [device], gradient_as_bucket_view=True), dynamic=False)
    return RankVariant(name, run, own, batch, "cuda")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=CASES, default=["gpt"])
    parser.add_argument("--micro-batch", nargs="+", type=int)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    for model in options.models:
        for size in options.micro_batch or [BATCH["cuda"][model]]:
            torch.manual_seed(0)
            module, batch = CASES[model](size, "cuda")
            module = module.to("cuda")
            variants = [variant(name, module, batch) for name in ("ortmodule", "compiled in DDP", "DDP compiled")]
            for _ in range(options.rounds):  # the first warms up
                for each in variants:
                    each.time(options.steps)
            others = min(each.median for each in variants if not each.is_ours)
            for each in variants if rank == 0 else ():
                ratio = {"of_fastest_other": round(each.median / others, 3)} if each.is_ours else {}
                line: dict[str, Any] = {
                    "model": model,
                    "micro_batch": size,
                    "ranks": dist.get_world_size(),
                    "variant": each.name,
                }
                line |= {"ms": round(each.median * 1e3, 2), "loss": round(each.loss, 4)} | ratio
                print(json.dumps(line), flush=True)
            del variants, each
            torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
