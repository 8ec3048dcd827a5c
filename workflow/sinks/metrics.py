"""Metrics of an event, by the names that sinks use. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

STEP = ("loss", "lr", "grad_norm", "epoch", "seconds", "samples", "tokens")
CHECKPOINT = {"seconds": "checkpoint_seconds", "stall_seconds": "checkpoint_stall_seconds", "bytes": "checkpoint_bytes"}
NO_METRIC = ("event", "time", "attempt", "rank", "step", "samples", "seconds")
"""Fields of an evaluation that are no metric of the model."""


def metrics_of(event: Mapping[str, Any]) -> dict[str, float]:
    """Finite numbers of an event by name; none if it has no metrics.

    Of a step its fields, what a program logs, and `samples_per_second` and `tokens_per_second`; of an evaluation
    `eval/NAME`; of a checkpoint its seconds and bytes; of `memory` `memory/PART` in bytes.
    """
    kind = event.get("event")
    if kind == "step":
        values = {**{name: event.get(name) for name in STEP}, **(event.get("values") or {})}
        seconds = event.get("seconds")
        if isinstance(seconds, int | float) and seconds > 0:
            for name in ("samples", "tokens"):
                if isinstance(count := event.get(name), int | float):
                    values[f"{name}_per_second"] = count / seconds
    elif kind == "evaluation":
        values = {f"eval/{name}": value for name, value in event.items() if name not in NO_METRIC}
    elif kind == "checkpoint":
        values = {new: event.get(name) for name, new in CHECKPOINT.items()}
    elif kind == "memory":
        values = {f"memory/{name}": value for name, value in event.items() if name not in NO_METRIC}
    else:
        values = {}
    return {name: float(value) for name, value in values.items() if _is_number(value)}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
