"""The model FLOPs utilisation of each step: its operations, as a share of what the devices could do meanwhile. Pure.

A window of `monitor.profile` says how many operations a step has, and how fast the devices are; the events of the steps
say how long each took, and how many samples it had. Operations of a step are in proportion to its samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import mean
from typing import Any

from ortflow.launchers.report.curves import Point
from ortflow.launchers.report.profile import Profile


def mfu_curve(events: Sequence[Mapping[str, Any]], profile: Profile | None) -> list[Point]:
    """Percent by step; empty without a profile, or where operations or speed are not known."""
    if profile is None or profile.flops is None or profile.peak is None:
        return []
    window = range(profile.first, profile.first + profile.steps)
    counts = [samples for event in _steps(events) if event["step"] in window and (samples := event.get("samples"))]
    if not counts:
        return []
    work = profile.flops / mean(counts)
    peak_per_rank = profile.peak[0] / profile.world_size
    starts = (event for event in events if event["event"] == "attempt_start")
    sizes = {int(start.get("attempt", 0)): start.get("world_size") or profile.world_size for start in starts}
    return [
        (float(event["step"]), 100 * work * event["samples"] / event["seconds"] / (peak_per_rank * ranks))
        for event in _steps(events)
        if event.get("samples")
        and event.get("seconds")
        and (ranks := sizes.get(int(event.get("attempt", 0)), profile.world_size))
    ]


def _steps(events: Iterable[Mapping[str, Any]]) -> Iterable[Mapping[str, Any]]:
    return (event for event in events if event["event"] == "step")
