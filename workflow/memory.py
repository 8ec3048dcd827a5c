"""What a rank holds in memory, part by part, in bytes. Pure but for `peak`.

Shown by `ortflow inspect` before a run and by the event `memory` behind its last step.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping

from ortflow.workflow.checkpoint.image import KEPT

ITEM = 4
"""Bytes of an element: everything that trains is fp32."""


def buffers(trained: int, kept: int, moments: int, *, accumulation: int = 1, world_size: int = 1) -> dict[str, int]:
    """Bytes of the flat buffers, and of what a checkpoint copies of this rank's share, by part.

    `trained` and `kept` are elements: of parameters that are trained, and of frozen ones and running statistics.
    `moments` is how many values the optimizer keeps for each trained one.
    """
    parts = {
        "parameters": (trained + kept) * ITEM,
        "gradients": trained * (2 if accumulation > 1 else 1) * ITEM,
        "moments": trained * moments * ITEM,
    }
    share = -(-(parts["parameters"] + parts["moments"]) // world_size)
    return {**parts, "checkpoint": min(share, KEPT)}


def with_peak(parts: Mapping[str, int], highest: int) -> dict[str, int]:
    """The parts, `values` (what graphs, libraries and data took beside them at most), and the `peak` itself."""
    return {**parts, "values": max(0, highest - sum(parts.values())), "peak": highest}


def peak() -> int:
    """Bytes that this process has held at most."""
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return highest if sys.platform == "darwin" else highest * 1024
