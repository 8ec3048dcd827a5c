"""Curves over the steps of a run, and their reduction to what a picture can show. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ortflow.launchers.view.progress import metrics

Point = tuple[float, float]
Curves = dict[str, list[Point]]
OF_STEPS = ("loss", "lr", "grad_norm")


def step_curves(events: Iterable[Mapping[str, Any]]) -> Curves:
    """Loss, learning rate, gradient norm, speeds and a program's own values, by name; only finite numbers."""
    curves: Curves = {}
    for event in events:
        if event["event"] != "step":
            continue
        step, seconds = float(event["step"]), event.get("seconds")
        for name in OF_STEPS:
            _add(curves, name, step, event.get(name))
        if seconds:
            for name in ("samples", "tokens"):
                count = event.get(name)
                _add(curves, f"{name}/s", step, count / seconds if count else None)
        values = event.get("values")
        if isinstance(values, dict):
            for name, value in values.items():
                _add(curves, str(name), step, value)
    return curves


def evaluation_curves(events: Iterable[Mapping[str, Any]]) -> Curves:
    """The loss and each metric of the evaluations, by name."""
    curves: Curves = {}
    for event in events:
        if event["event"] == "evaluation":
            for name, value in metrics(event).items():
                _add(curves, name, float(event["step"]), value)
    return curves


def _add(curves: Curves, name: str, step: float, value: object) -> None:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        curves.setdefault(name, []).append((step, float(value)))


def reduced(points: Sequence[Point], columns: int) -> list[Point]:
    """The smallest and the largest value of each of `columns` columns, in the order of the points.

    No peak is lost: a curve of many points looks as if all were drawn.
    """
    if len(points) <= 2 * columns:
        return list(points)
    first, last = points[0][0], points[-1][0]
    width = (last - first) / columns or 1.0
    extremes: list[Point] = []
    column, low, high = -1, points[0], points[0]
    for point in points:
        at = min(columns - 1, int((point[0] - first) / width))
        if at != column:
            if column >= 0:
                extremes += _ordered(low, high)
            column, low, high = at, point, point
        elif point[1] < low[1]:
            low = point
        elif point[1] > high[1]:
            high = point
    return extremes + _ordered(low, high)


def _ordered(low: Point, high: Point) -> list[Point]:
    if low == high:
        return [low]
    return [low, high] if low[0] < high[0] else [high, low]


SPARKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int) -> str:
    """Values as a line of bars, the newest `width` of their means."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite or width < 1:
        return ""
    count = min(width, len(finite))
    parts = [finite[len(finite) * place // count : len(finite) * (place + 1) // count] for place in range(count)]
    means = [sum(part) / len(part) for part in parts]
    low, high = min(means), max(means)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((mean - low) * scale)] for mean in means)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers between two values, at most about `count`."""
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((factor * power for factor in (1, 2, 5, 10) if factor * power >= rough), 10 * power)
    first = math.ceil(low / step)
    return [place * step for place in range(first, math.floor(high / step + 1e-9) + 1)]
