"""The report of a run as one HTML page that loads nothing. Pure; every text is escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from html import escape
from typing import Any

from ortflow.launchers.report.causes import MEANINGS
from ortflow.launchers.report.curves import Curves, evaluation_curves, step_curves
from ortflow.launchers.report.mfu import mfu_curve
from ortflow.launchers.report.rank_rows import rank_rows
from ortflow.launchers.report.state import sentence
from ortflow.launchers.report.style import CAUSES, CSS, SCRIPT, SERIES
from ortflow.launchers.report.survey import Survey
from ortflow.launchers.report.svg import legend, line_chart, share_bar, time_axis
from ortflow.launchers.report.timeline import MICRO
from ortflow.launchers.view.lines import duration, size

MFU = "mfu, %"
"""Name of the curve: not one that a program may log as `mfu`."""
CHARTS = {
    "loss": "Loss",
    "lr": "Learning rate",
    "grad_norm": "Gradient norm",
    "samples/s": "Samples per second",
    "tokens/s": "Tokens per second",
    MFU: "Model FLOPs utilisation, %",
}
MOST_CHARTS = 40
Row = Sequence[str]


@dataclass(frozen=True)
class Contents:
    """What a page shows besides the run's records."""

    rows: Sequence[tuple[str, str]] = ()
    """The status, as names and values."""
    run_file: str = ""
    others: Sequence[Survey] = ()
    """Runs whose curves are drawn beside this one's."""
    sections: Sequence[str] = field(default_factory=tuple)
    """Further sections, as HTML."""
    last: Sequence[str] = ()
    """Those that come before the records."""
    refresh: int | None = None
    """Seconds after which a browser loads the page again."""


def page(run: Survey, contents: Contents, now: float) -> str:
    """The whole page."""
    sections = [
        section("Status", table(("", ""), contents.rows, caption=f"As of {moment(now)}")),
        *contents.sections,
        curves([run, *contents.others]),
        _time(run),
        _restarts(run),
        _ranks(run),
        *contents.last,
        _records(run, contents.run_file),
    ]
    return document(run.status.name, run.status.state.value, sentence(run), sections, contents.refresh)


def document(name: str, state: str, lead: str, sections: Sequence[str], refresh: int | None = None) -> str:
    """A page of sections, which are HTML."""
    again = f'<meta http-equiv="refresh" content="{refresh}">' if refresh else ""
    return "".join(
        (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width,initial-scale=1">',
            # Without an icon a browser asks the server for /favicon.ico.
            f'<meta name="color-scheme" content="light dark">{again}<link rel="icon" href="data:,">',
            f"<title>{escape(name)}: {escape(state)}</title>",
            f"<style>{CSS}{CAUSES}{SERIES}</style></head><body><main>",
            f'<h1>{escape(name)}</h1><p class="lead">{escape(lead)}</p>',
            *sections,
            f"</main><script>{SCRIPT}</script></body></html>",
        )
    )


def moment(now: float) -> str:
    """A Unix time in UTC, for people."""
    return datetime.fromtimestamp(now, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def section(title: str, body: str) -> str:
    """A part of a page under a heading; empty without a body."""
    return f"<section><h2>{escape(title)}</h2>{body}</section>" if body else ""


def table(head: Row, rows: Sequence[Row], *, caption: str = "", label: str = "", numbers: Sequence[int] = ()) -> str:
    """A table; empty without rows. `numbers` are the columns that are aligned to the right.

    Screen readers name it by its caption, else by `label`.
    """
    if not rows:
        return ""
    style = dict.fromkeys(numbers, ' class="n"')
    above = "".join(f'<th scope="col"{style.get(i, "")}>{escape(text)}</th>' for i, text in enumerate(head))
    body = "".join(
        "<tr>"
        + f'<th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td{style.get(i, '')}>{escape(text)}</td>" for i, text in enumerate(row[1:], 1))
        + "</tr>"
        for row in rows
    )
    heading = f"<thead><tr>{above}</tr></thead>" if any(head) else ""
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    name = f' aria-label="{escape(label)}"' if label else ""
    return f'<div class="scroll"><table{name}>{title}{heading}<tbody>{body}</tbody></table></div>'


def curves(runs: Sequence[Survey]) -> str:
    """The curves of one or several runs, as a section."""
    steps = [curves_of(run) for run in runs]
    evaluations = [evaluation_curves(run.events) for run in runs]
    marks = [float(event["step"]) for event in runs[0].events if event["event"] == "resume"]
    names = list(dict.fromkeys(name for curves in steps for name in curves))
    names.sort(key=lambda name: [*CHARTS, name].index(name))
    figures = [_figure(CHARTS.get(name, name), name, steps, runs, marks, f"c{n}") for n, name in enumerate(names)]
    names = list(dict.fromkeys(name for curves in evaluations for name in curves))
    figures += [_figure(f"Evaluation: {name}", name, evaluations, runs, marks, f"e{n}") for n, name in enumerate(names)]
    drawn = [figure for figure in figures if figure]
    rest = f"<p>{len(drawn) - MOST_CHARTS} further curves are not drawn.</p>" if len(drawn) > MOST_CHARTS else ""
    return section("Curves", f'<div class="grid-of">{"".join(drawn[:MOST_CHARTS])}</div>{rest}' if drawn else "")


def curves_of(run: Survey) -> Curves:
    """The curves of the steps of a run, by name."""
    step_values = step_curves(run.events)
    points = mfu_curve(run.events, run.profile)
    return {**step_values, MFU: points} if points else step_values


def _figure(
    title: str, name: str, curves: Sequence[Curves], runs: Sequence[Survey], marks: Sequence[float], identifier: str
) -> str:
    labels = _labels(runs)
    series = {
        label: curves_of_run[name] for label, curves_of_run in zip(labels, curves, strict=True) if name in curves_of_run
    }
    chart = line_chart(f"{title} over steps", series, identifier=identifier, marks=marks)
    return f"<figure><figcaption>{escape(title)}</figcaption>{chart}{legend(list(series))}</figure>" if chart else ""


def _labels(runs: Sequence[Survey]) -> list[str]:
    """The runs' names; their directories where names are equal."""
    names = [run.status.name for run in runs]
    return [name if names.count(name) == 1 else run.status.directory for name, run in zip(names, runs, strict=True)]


def _time(run: Survey) -> str:
    account = run.account
    if account.wall <= 0:
        return ""
    rows = [
        (cause.label, duration(value / MICRO), f"{100 * value / account.wall:.1f}%", MEANINGS[cause])
        for cause, value in account.totals.items()
        if value
    ]
    goodput = "unknown" if account.goodput is None else f"{100 * account.goodput:.1f}%"
    keys = "".join(
        f'<li><span class="key c-{cause.value}"></span>{escape(cause.label)}</li>'
        for cause, value in account.totals.items()
        if value
    )
    stopped = (
        f"<p>Not counted: {escape(duration(account.stopped / MICRO))} in which the run was stopped.</p>"
        if account.stopped
        else ""
    )
    notes = "".join(f"<p>Note: {escape(note)}.</p>" for note in account.notes)
    lines, note = rank_rows(run)
    labels = "".join(f"<li>{escape(name)}</li>" for name, _ in lines)
    seconds = (account.end - account.start) / MICRO
    axis = (
        "<figure><figcaption>Attempts and ranks over time (keys + − 0 ← →, or Ctrl and the wheel)</figcaption>"
        '<div class="axis-box"><div>'
        '<button type="button" data-key="+">Zoom in</button> <button type="button" data-key="-">Zoom out</button> '
        '<button type="button" data-key="0">All</button></div>'
        f'<div class="axis"><ol aria-hidden="true">{labels}</ol><div>'
        f'<div class="zoom" tabindex="0" role="group" aria-label="Time axis" data-seconds="{seconds:.6f}">'
        f"{time_axis(lines, account.start, account.end, identifier='axis')}</div>"
        f'<div class="times">{"<span></span>" * 5}</div></div></div></div>{note}</figure>'
    )
    return section(
        f"Goodput {goodput} of {duration(account.wall / MICRO)}",
        f'<figure class="bar">{share_bar(account.totals, identifier="bar")}<ul class="legend">{keys}</ul></figure>'
        + table(("Cause", "Time", "Share", "Meaning"), rows, label="Wall time by cause", numbers=(1, 2))
        + stopped
        + notes
        + axis,
    )


def _restarts(run: Survey) -> str:
    rows = [
        (
            str(end.attempt), end.cause, end.node or "-", end.outcome if end.counts else f"{end.outcome}, not counted",
            _used(end.failures, end.failures_left), _used(end.preemptions, end.preemptions_left), str(end.steps_lost),
            duration(end.seconds_lost),
            "-" if end.seconds_to_first_step is None else duration(end.seconds_to_first_step),
        )
        for end in run.restarts
    ]  # fmt: skip
    head = (
        "Attempt", "Cause of its end", "Node", "Kind", "Failures used", "Preemptions used", "Steps run again",
        "Their time", "Until the next first step",
    )  # fmt: skip
    return section("Restarts", table(head, rows, label="Restarts", numbers=(6, 7, 8)) + _risk(run))


def _used(used: int, limit_left: int | None) -> str:
    return str(used) if limit_left is None else f"{used}, {limit_left} left"


def _risk(run: Survey) -> str:
    risk = run.risk
    if risk is None:
        return ""
    newest = "none" if risk.checkpoint is None else f"step {risk.checkpoint}"
    age = "" if risk.age is None else f", {duration(risk.age)} old"
    text = f"Work at risk: {risk.steps} steps, {duration(risk.seconds)}. Newest checkpoint: {newest}{age}."
    return f"<p>{escape(text)}</p>"


def _ranks(run: Survey) -> str:
    if len(run.ranks.records) < 2 or (run.waits.slowest is None and not run.times):
        return ""
    waits, parts = run.waits, []
    if run.straggler is not None:
        parts.append(run.straggler.sentence())
    elif run.times:
        parts.append("No rank is slower than its peers by a tenth of a step.")
    if waits.slowest is not None:
        parts.append(
            f"Rank {waits.slowest} waited longest for its samples: {100 * waits.share:.1f}% of the time of "
            f"{waits.steps} steps that were compared."
        )
    rows = [
        (
            str(times_of_rank.rank),
            *(
                f"{1000 * value:.2f}"
                for value in (times_of_rank.step, times_of_rank.compute, times_of_rank.data, times_of_rank.comm)
            ),
        )
        for times_of_rank in run.times
    ]
    head = ("Rank", "Step", "Compute", "Data wait", "Calls to other ranks")
    shown = table(head, rows, caption="Average milliseconds of a step", numbers=(1, 2, 3, 4))
    return section("Slowest rank", "".join(f"<p>{escape(part)}</p>" for part in parts) + shown)


def _records(run: Survey, run_file: str) -> str:
    parts = []
    if (preflight := _newest(run.events, "preflight")) and isinstance(preflight.get("nodes"), dict):
        parts.append(_details("Nodes in the preflight", table(("", ""), _flat(preflight["nodes"]))))
    if run.status.excluded_nodes:
        parts.append(_details("Excluded nodes", table(("", ""), _flat(run.status.excluded_nodes))))
    environment = _newest(run.events, "environment")
    if environment:
        parts.append(_details("Environment", table(("", ""), _flat(environment), label="Environment")))
    memory = _newest(run.events, "memory")
    if memory:
        rows = [(name, size(value)) for name, value in memory.items() if isinstance(value, int)]
        parts.append(_details("Memory of rank 0", table(("Part", "Size"), rows, label="Memory", numbers=(1,))))
    if run_file:
        parts.append(_details("Run file", f"<pre>{escape(run_file)}</pre>"))
    return section("Records", "".join(parts))


def _details(title: str, body: str) -> str:
    return f"<details open><summary>{escape(title)}</summary>{body}</details>"


def _newest(events: Sequence[Mapping[str, Any]], kind: str) -> dict[str, Any]:
    event_fields: Mapping[str, Any] = next((event for event in reversed(events) if event["event"] == kind), {})
    return {key: value for key, value in event_fields.items() if key not in ("event", "time", "attempt", "rank")}


def _flat(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(name, str(value)) for name, value in values.items() if value not in (None, "")]
