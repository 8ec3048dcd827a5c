"""The memory of a rank by part, in bytes. Pure except for `peak`, `resident` and `trim`.

Shown by `ortflow inspect` before a run and by the event `memory` after its last step.
"""

from __future__ import annotations

import ctypes
import resource
import sys
from collections.abc import Mapping

from ortflow.workflow.layout import share
from ortflow.workflow.spec.optimizers import moment_counts

ITEM = 4
"""Bytes per element: everything trained is fp32."""
KEPT = 256 << 20
"""Bytes at the end of a rank's checkpoint that are copied before it is written."""


def buffers(
    trained: int,
    untrained: int,
    moments: int,
    *,
    accumulation: int = 1,
    world_size: int = 1,
    zero: int = 0,
    rank: int = 0,
    messages: int = 0,
    chunks: int = 1,
    staging: int | None = None,
    copied: int | None = KEPT,
) -> dict[str, int]:
    """Bytes of the flat buffers, and of the copy of this rank's share that a checkpoint makes, by part.

    `trained` and `untrained` are numbers of elements: of trained parameters, and of frozen ones and running statistics.
    `moments` is the number of values that the optimizer keeps per trained element. From stage 1 of ZeRO, a rank keeps
    them for its share only; from stage 2, it accumulates the gradients of its share only, in addition to those of one
    micro-batch. Under stage 3, gradients and parameters cover its share only, too, and `messages` is the number of
    elements in the buffers through which layers are fetched. If some parameters are not trained, a checkpoint saves a
    second share.
    With `staging`, the moments are off-loaded to the host, and pass through so many elements of the device.
    A checkpoint copies at most `copied` bytes; None: all, as on GPUs.
    With several `chunks`, stages of one rank of a pipeline, gradients are accumulated within a single micro-batch, too.
    """
    start, stop = share(trained, rank, world_size)
    shard = stop - start
    accumulated = 0 if accumulation == chunks == 1 else shard if zero >= 2 else trained
    first, last = share(trained + untrained, rank, world_size)
    held_elements = shard + untrained + (last - first if untrained else 0)
    parts = {
        "parameters": (held_elements if zero == 3 else trained + untrained) * ITEM,
        "gradients": (shard if zero == 3 else trained + accumulated) * ITEM,
        "moments": (shard if zero else trained) * moments * ITEM,
    }
    if zero == 3:
        parts["messages"] = messages * ITEM
    if staging is not None:
        parts[OFFLOADED], parts["moments"] = parts["moments"], staging * ITEM
    saved = -(-(trained * (1 + moments) + untrained) * ITEM // world_size)
    return {**parts, "checkpoint": saved if copied is None else min(saved, copied)}


LOWER = "lower it: train.global_batch or a larger train.gradient_accumulation keep the batch of a step"
HELP: Mapping[str, tuple[str, str]] = {
    "parameters": ("parallel.zero", "set it to 3, which shards them over the ranks, or use GPUs with more memory"),
    "gradients": ("train.gradient_accumulation", "set it to 1, which stores gradients once"),
    "moments": (
        "train.offload",
        "set it to optimizer, or parallel.zero to 1; train.optimizer.name sets the values stored per parameter: "
        f"{moment_counts()}",
    ),
    "activations": ("data.micro_batch", f"{LOWER}; model.recompute recomputes values of the forward pass"),
}
"""Part of a device's memory -> the key that it depends on, and what to do if it is too large."""


def fullest(parts: Mapping[str, int], total: int) -> tuple[str, int]:
    """The largest part of a full device of `total` bytes, and its bytes.

    `parts` are the flat buffers'; the remainder is `activations`, the values of the graphs.
    """
    buffers_ = {name: count for name, count in parts.items() if name in HELP}
    all_parts = {**buffers_, "activations": max(0, total - sum(buffers_.values()))}
    name = max(all_parts, key=lambda part: all_parts[part])
    return name, all_parts[name]


OFFLOADED = "offloaded"
"""Part: moments in the host's memory."""
ON_HOST = ("checkpoint", OFFLOADED)
"""Parts that are in the host's memory, on whatever device the rank computes."""


def of_device(parts: Mapping[str, int], *, gpu: bool) -> int:
    """Bytes of the parts that the device has: a GPU does not have those of the host."""
    return sum(count for name, count in parts.items() if not (gpu and name in ON_HOST))


def with_peak(parts: Mapping[str, int], highest: int, device: Mapping[str, int] | None = None) -> dict[str, int]:
    """The parts, `values` (the maximum used by graphs, libraries and data), and the `peak` itself.

    `device` is what was measured on a GPU: its `gpu_peak`, to which `values` then refers, and others.
    """
    if not device:
        return {**parts, "values": max(0, highest - sum(parts.values())), "peak": highest}
    return {**parts, "values": max(0, device["gpu_peak"] - of_device(parts, gpu=True)), "peak": highest, **device}


def peak() -> int:
    """Maximum resident bytes of this process so far."""
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return highest if sys.platform == "darwin" else highest * 1024


def resident() -> int:
    """Resident bytes of this process now."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def trim() -> None:
    """Return freed memory to the system if the C library supports it."""
    # glibc keeps small blocks.
    release = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if release is not None:
        release(0)
