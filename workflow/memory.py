"""What a rank holds in memory, part by part, in bytes. Pure but for `peak` and `trim`.

Shown by `ortflow inspect` before a run and by the event `memory` behind its last step.
"""

from __future__ import annotations

import ctypes
import resource
import sys
from collections.abc import Mapping

from ortflow.workflow.layout import share
from ortflow.workflow.spec.optimizers import moment_counts

ITEM = 4
"""Bytes of an element: everything that trains is fp32."""
KEPT = 256 << 20
"""Bytes of the end of a rank's checkpoint that are copied before it is written."""


def buffers(
    trained: int,
    kept: int,
    moments: int,
    *,
    accumulation: int = 1,
    world_size: int = 1,
    zero: int = 0,
    rank: int = 0,
    messages: int = 0,
    chunks: int = 1,
) -> dict[str, int]:
    """Bytes of the flat buffers, and of what a checkpoint copies of this rank's share, by part.

    `trained` and `kept` are elements: of parameters that are trained, and of frozen ones and running statistics.
    `moments` is how many values the optimizer keeps for each trained one. From stage 1 of ZeRO on a rank keeps them for
    its share alone; from stage 2 on it accumulates the gradients of its share alone, beside those of one micro-batch.
    Under stage 3 gradients and parameters are of its share alone, too, and `messages` are elements of the memory
    through which layers are fetched; what a checkpoint saves of parameters is a second share, if some are not trained.
    With several `chunks`, stages of one rank of a pipeline, gradients are added up within a single micro-batch, too.
    """
    start, stop = share(trained, rank, world_size)
    mine = stop - start
    accumulated = 0 if accumulation == chunks == 1 else mine if zero >= 2 else trained
    first, last = share(trained + kept, rank, world_size)
    held = mine + kept + (last - first if kept else 0)
    parts = {
        "parameters": (held if zero == 3 else trained + kept) * ITEM,
        "gradients": (mine if zero == 3 else trained + accumulated) * ITEM,
        "moments": (mine if zero else trained) * moments * ITEM,
    }
    if zero == 3:
        parts["messages"] = messages * ITEM
    saved = -(-(trained * (1 + moments) + kept) * ITEM // world_size)
    return {**parts, "checkpoint": min(saved, KEPT)}


LOWER = "lower it: train.global_batch or a larger train.gradient_accumulation keep the batch of a step"
HELP: Mapping[str, tuple[str, str]] = {
    "parameters": ("resources", "use GPUs with more memory: each stores all parameters"),
    "gradients": ("train.gradient_accumulation", "set it to 1, which stores gradients once"),
    "moments": ("train.optimizer.name", f"values stored per parameter: {moment_counts()}"),
    "activations": ("data.micro_batch", f"{LOWER}; model.recompute recomputes values of the forward pass"),
}
"""Part of a device's memory -> the key that it follows, and what to do where it is too large."""


def fullest(parts: Mapping[str, int], total: int) -> tuple[str, int]:
    """The part that takes most of a full device of `total` bytes, and its bytes.

    `parts` are the flat buffers'; what is left are the values of the graphs, `activations`.
    """
    buffers_ = {name: count for name, count in parts.items() if name in HELP}
    whole = {**buffers_, "activations": max(0, total - sum(buffers_.values()))}
    name = max(whole, key=lambda part: whole[part])
    return name, whole[name]


def with_peak(parts: Mapping[str, int], highest: int) -> dict[str, int]:
    """The parts, `values` (what graphs, libraries and data took beside them at most), and the `peak` itself."""
    return {**parts, "values": max(0, highest - sum(parts.values())), "peak": highest}


def peak() -> int:
    """Bytes that this process has held at most."""
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return highest if sys.platform == "darwin" else highest * 1024


def trim() -> None:
    """Give back to the system what the C library keeps of freed memory, where it can: glibc keeps small pieces."""
    release = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if release is not None:
        release(0)
