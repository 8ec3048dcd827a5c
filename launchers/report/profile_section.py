"""The profile and the memory of ranks, as sections of a report's page. Pure; every text is escaped."""

from __future__ import annotations

from html import escape

from ortflow.launchers.report.advice import advice
from ortflow.launchers.report.page import section, table
from ortflow.launchers.report.profile import Profile
from ortflow.launchers.report.profile_table import HEADS, head
from ortflow.launchers.report.profile_table import table as rows_of
from ortflow.launchers.report.rank_records import Ranks
from ortflow.launchers.report.svg import legend, line_chart

ROWS = 15
MOST_RANKS = 8
"""Ranks whose memory is drawn: those that use most."""


def profile_section(profile: Profile | None) -> str:
    """The table and what would help; empty without a profile."""
    if profile is None:
        return ""
    sentences = "".join(f"<li>{escape(text)}</li>" for text in advice(profile))
    numbers = range(1, 1 + len(HEADS))
    tables = "".join(
        table([name.capitalize() for name in rows[0]], rows[1:], caption=caption, numbers=numbers)
        for caption, rows in (
            ("By operator, for one step of one rank", rows_of(profile, "operator", ROWS)),
            ("By module", rows_of(profile, "module", ROWS)),
        )
    )
    note = "" if profile.mfu is not None else f"<p>MFU unknown: {escape(why_unknown(profile))}.</p>"
    sentence_list = f"<ol>{sentences}</ol>" if sentences else ""
    return section("Profile", f"<p>{escape(head(profile))}.</p>{note}{sentence_list}{tables}")


def why_unknown(profile: Profile) -> str:
    """What the MFU lacks."""
    if profile.flops is None:
        return "the operations of the model are not counted"
    return "the greatest speed of this device is not known"


def memory_section(ranks: Ranks) -> str:
    """Resident and device memory of ranks over the steps; empty if nothing was recorded."""
    charts = []
    for number, (name, title) in enumerate((("resident", "Memory of processes, GB"), ("gpu_peak", "GPU memory, GB"))):
        series = {
            f"rank {record.rank}": [
                (float(step), usage[name] / 1e9) for step, usage in sorted(record.usage.items()) if name in usage
            ]
            for record in ranks.records
            if any(name in usage for usage in record.usage.values())
        }
        largest = sorted(series, key=lambda rank: -max(value for _, value in series[rank]))[:MOST_RANKS]
        drawn = {rank: points for rank, points in series.items() if rank in largest}
        chart = line_chart(f"{title} over steps", drawn, identifier=f"m{number}")
        if chart:
            charts.append(f"<figure><figcaption>{title}</figcaption>{chart}{legend(list(drawn))}</figure>")
    return section("Memory", f'<div class="grid-of">{"".join(charts)}</div>' if charts else "")
