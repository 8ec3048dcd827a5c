"""Parallel coordinates: one line a run through its values and results. Pure; every text is escaped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from ortflow.launchers.report.svg import heading, short

WIDTH, HEIGHT, TOP, BOTTOM, SIDE = 1000, 300, 34, 30, 90


def parallel_coordinates(
    axes: Sequence[str], runs: Sequence[tuple[str, Sequence[str | float | None]]], best: int | None, *, identifier: str
) -> str:
    """One axis for each name; a run has a value on each, or None, where its line is interrupted.

    Axes whose values are all numbers are scales; on others each text has its place. Empty with fewer than two axes.
    """
    if len(axes) < 2 or not runs:
        return ""
    columns = [[values[place] for _, values in runs] for place in range(len(axes))]
    places = [_places(column) for column in columns]
    parts = [heading("Values and results of the runs", _description(axes, runs, best), identifier, WIDTH, HEIGHT)]
    for place, (name, column) in enumerate(zip(axes, columns, strict=True)):
        x = _x(place, len(axes))
        parts.append(f'<path class="grid" d="M{x:.1f},{TOP}V{HEIGHT - BOTTOM}"/>')
        parts.append(f'<text x="{x:.1f}" y="{TOP - 18}" text-anchor="middle">{escape(name)}</text>')
        for text, at in _labels(column, places[place]):
            parts.append(f'<text x="{x + 5:.1f}" y="{_y(at) + 4:.1f}">{escape(text)}</text>')
    # The best run is drawn last, above the others.
    order = sorted(range(len(runs)), key=lambda number: number == best)
    for number in order:
        points = [
            None if (height := places[place][number]) is None else f"{_x(place, len(axes)):.1f},{_y(height):.1f}"
            for place in range(len(axes))
        ]
        style = "s1 best" if number == best else "s0 run"
        name = escape(runs[number][0])
        parts += [
            f'<polyline class="{style}" points="{piece}"><title>{name}</title></polyline>' for piece in _pieces(points)
        ]
    return "".join([*parts, "</svg>"])


def _places(column: Sequence[str | float | None]) -> list[float | None]:
    """The height of each value, from 0 to 1."""
    numbers = [_number(value) for value in column]
    if all(number is not None for number, value in zip(numbers, column, strict=True) if value is not None):
        finite = [number for number in numbers if number is not None]
        low, high = min(finite, default=0.0), max(finite, default=0.0)
        return [None if number is None else (number - low) / (high - low) if high > low else 0.5 for number in numbers]
    texts = list(dict.fromkeys(str(value) for value in column if value is not None))
    last = max(1, len(texts) - 1)
    return [None if value is None else texts.index(str(value)) / last for value in column]


def _number(value: str | float | None) -> float | None:
    try:
        number = float("nan" if value is None else value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _labels(column: Sequence[str | float | None], heights: Sequence[float | None]) -> list[tuple[str, float]]:
    """The texts of an axis: all if there are few values, else those of its ends."""
    texts = {
        height: short(number) if (number := _number(value)) is not None else str(value)
        for value, height in zip(column, heights, strict=True)
        if height is not None
    }
    if len(texts) > 8:
        texts = {height: text for height, text in texts.items() if height in (0.0, 1.0)}
    return [(text, height) for height, text in texts.items()]


def _pieces(points: Sequence[str | None]) -> list[str]:
    """Consecutive points that are known, two or more."""
    pieces: list[list[str]] = [[]]
    for point in points:
        if point is None:
            pieces.append([])
        else:
            pieces[-1].append(point)
    return [" ".join(piece) for piece in pieces if len(piece) > 1]


def _x(place: int, count: int) -> float:
    return SIDE + (WIDTH - 2 * SIDE) * place / (count - 1)


def _y(height: float) -> float:
    return TOP + (1 - height) * (HEIGHT - TOP - BOTTOM)


def _description(
    axes: Sequence[str], runs: Sequence[tuple[str, Sequence[str | float | None]]], best: int | None
) -> str:
    text = f"{len(runs)} runs over {', '.join(axes)}"
    if best is None:
        return text
    name, values = runs[best]
    return f"{text}; the best is {name}: " + ", ".join(f"{a} {v}" for a, v in zip(axes, values, strict=True))
