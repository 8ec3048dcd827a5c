"""The rows of the time axis: the run by cause, and one row a rank with a bar for each attempt. Pure."""

from __future__ import annotations

from ortflow.launchers.report.survey import Survey
from ortflow.launchers.report.svg import coarse
from ortflow.launchers.report.timeline import MICRO
from ortflow.launchers.view.lines import duration

MOST_ROWS = 256
Bar = tuple[int, int, str, str]


def rank_rows(run: Survey) -> tuple[list[tuple[str, list[Bar]]], str]:
    """Rows of bars (start, end, class, text), and HTML about ranks that have none."""
    bars: list[Bar] = [
        (start, end, f"c-{cause.value}", f"{cause.label}, {duration((end - start) / MICRO)}")
        for start, end, cause in coarse(run.account.segments)
    ]
    rows = [("run", bars)]
    for record in run.ranks.records[:MOST_ROWS]:
        own_bars: list[Bar] = []
        for attempt in run.account.attempts:
            if attempt.number not in record.spans:
                continue
            first, last = record.spans[attempt.number]
            shift = run.account.lines[attempt.number].shift
            start, end = max(attempt.start, first + shift), min(attempt.end, last + shift)
            node = record.hosts.get(attempt.number, "unknown node")
            text = f"rank {record.rank}, attempt {attempt.number}, on {node}: {duration((end - start) / MICRO)}"
            own_bars.append((start, max(start, end), "s-rank", text))
        rows.append((f"rank {record.rank}", own_bars))
    undrawn = len(run.ranks.records) - MOST_ROWS
    return rows, f"<p>{undrawn} further ranks are not drawn.</p>" if undrawn > 0 else ""
