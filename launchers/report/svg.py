"""Charts as SVG, drawn from numbers. Pure; every text is escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from ortflow.launchers.report.causes import Cause
from ortflow.launchers.report.curves import Point, reduced, ticks
from ortflow.launchers.report.timeline import Segment

WIDTH, HEIGHT = 560, 210
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 10, 28
COLOURS = 8
"""Series with a colour of their own (classes s0, s1, …); further ones begin again."""


def line_chart(
    title: str, series: Mapping[str, Sequence[Point]], *, identifier: str, marks: Sequence[float] = ()
) -> str:
    """Curves over steps; `marks` are the steps at which attempts resumed. Empty if there are no points."""
    lines = {name: points for name, points in series.items() if points}
    if not lines:
        return ""
    x_low, x_high = _range([point[0] for points in lines.values() for point in (points[0], points[-1])])
    columns = WIDTH - LEFT - RIGHT
    drawn = {name: reduced(points, columns) for name, points in lines.items()}
    y_low, y_high = _range([point[1] for points in drawn.values() for point in points])

    def place(point: Point) -> str:
        x = LEFT + (point[0] - x_low) / (x_high - x_low) * columns
        y = TOP + (y_high - point[1]) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)
        return f"{x:.1f},{y:.1f}"

    parts = [heading(title, _description(lines), identifier, WIDTH, HEIGHT)]
    for value in ticks(y_low, y_high):
        at = float(place((x_low, value)).split(",")[1])
        parts.append(f'<path class="grid" d="M{LEFT},{at:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{escape(short(value))}</text>')
    for value in ticks(x_low, x_high):
        x = place((value, y_low)).split(",")[0]
        parts.append(f'<text x="{x}" y="{HEIGHT - 10}" text-anchor="middle">{escape(short(value))}</text>')
    for mark in marks:
        if x_low <= mark <= x_high:
            x = place((mark, y_low)).split(",")[0]
            parts.append(
                f'<path class="mark" d="M{x},{TOP}V{HEIGHT - BOTTOM}"><title>resumed at step {mark:g}</title></path>'
            )
    for number, points in enumerate(drawn.values()):
        style = f"s{number % COLOURS}"
        if len(points) == 1:
            x, y = place(points[0]).split(",")
            parts.append(f'<circle class="{style}" cx="{x}" cy="{y}" r="3"/>')
        else:
            parts.append(f'<polyline class="{style}" points="{" ".join(map(place, points))}"/>')
    return "".join([*parts, "</svg>"])


def legend(names: Sequence[str]) -> str:
    """The names of several series with their colours; empty for one."""
    if len(names) < 2:
        return ""
    items = (f'<li><span class="key s{place % COLOURS}"></span>{escape(name)}</li>' for place, name in enumerate(names))
    return f'<ul class="legend">{"".join(items)}</ul>'


def share_bar(totals: Mapping[Cause, int], *, identifier: str) -> str:
    """Time by cause as one bar."""
    wall = sum(totals.values())
    text = ", ".join(f"{cause.label} {100 * value / wall:.1f}%" for cause, value in totals.items() if value)
    parts = [heading("Wall time by cause", text or "no time yet", identifier, 1000, 34, 'preserveAspectRatio="none"')]
    at = 0.0
    for cause, value in totals.items():
        if value:
            width = 1000 * value / wall
            label = escape(f"{cause.label}: {100 * value / wall:.1f}%")
            place = f'x="{at:.2f}" y="0" width="{width:.2f}" height="34"'
            parts.append(f'<rect class="c-{cause.value}" {place}><title>{label}</title></rect>')
            at += width
    return "".join([*parts, "</svg>"])


def time_axis(
    rows: Sequence[tuple[str, Sequence[tuple[int, int, str, str]]]], start: int, end: int, *, identifier: str
) -> str:
    """One row of bars each; a bar has its start and end, a class and a text. The script of the page zooms it."""
    height = 16 * len(rows)
    scale = 10_000 / max(1, end - start)
    # By default a browser scales both axes alike, by the width: rows of 16 units would be too low to see.
    extra = f'preserveAspectRatio="none" style="height:{height}px"'
    text = "Rows: " + ", ".join(name for name, _ in rows[:8])
    parts = [heading("Time of the run, its attempts and ranks", text, identifier, 10_000, height, extra)]
    for place, (_, bars) in enumerate(rows):
        for first, last, style, label in bars:
            x, width = (first - start) * scale, max(0.5, (last - first) * scale)
            parts.append(
                f'<rect class="{style}" x="{x:.1f}" y="{16 * place + 2}" width="{width:.1f}" height="12">'
                f"<title>{escape(label)}</title></rect>"
            )
    return "".join([*parts, "</svg>"])


def coarse(segments: Sequence[Segment], pieces: int = 1500) -> list[Segment]:
    """At most about `pieces` segments: short ones are joined and take the cause with the most time."""
    if not segments:
        return []
    least = (segments[-1].end - segments[0].start) // pieces
    pieces_found: list[Segment] = []
    gathered: list[Segment] = []
    for segment in segments:
        if gathered and segment.start > gathered[-1].end:
            pieces_found += _joined(gathered)
            gathered = []
        gathered.append(segment)
        if segment.end - gathered[0].start >= least:
            pieces_found += _joined(gathered)
            gathered = []
    merged: list[Segment] = []
    for segment in [*pieces_found, *_joined(gathered)]:
        if merged and merged[-1].cause is segment.cause and merged[-1].end == segment.start:
            merged[-1] = Segment(merged[-1].start, segment.end, segment.cause)
        else:
            merged.append(segment)
    return merged


def _joined(segments: Sequence[Segment]) -> list[Segment]:
    if not segments:
        return []
    totals: dict[Cause, int] = {}
    for start, end, cause in segments:
        totals[cause] = totals.get(cause, 0) + end - start
    return [Segment(segments[0].start, segments[-1].end, max(totals, key=lambda cause: totals[cause]))]


def heading(title: str, description: str, identifier: str, width: int, height: int, extra: str = "") -> str:
    """The beginning of a picture that screen readers describe."""
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-labelledby="{identifier}-t {identifier}-d" {extra}>'
        f'<title id="{identifier}-t">{escape(title)}</title><desc id="{identifier}-d">{escape(description)}</desc>'
    )


def _description(lines: Mapping[str, Sequence[Point]]) -> str:
    parts = []
    for name, points in list(lines.items())[:COLOURS]:
        values = [value for _, value in points]
        parts.append(
            f"{name}: {values[0]:.4g} at step {points[0][0]:g}, {values[-1]:.4g} at step {points[-1][0]:g}, "
            f"least {min(values):.4g}, greatest {max(values):.4g}"
        )
    return "; ".join(parts)


def _range(values: Sequence[float]) -> tuple[float, float]:
    """The least and the greatest, apart."""
    low, high = min(values), max(values)
    if high > low:
        return low, high
    room = abs(low) * 0.1 or 1.0
    return low - room, high + room


def short(value: float) -> str:
    """A number in a few characters."""
    if value and abs(value) >= 10_000:
        for power, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
            if abs(value) >= power:
                return f"{value / power:.4g}{unit}"
    return f"{value:.4g}"
