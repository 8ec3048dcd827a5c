"""The table of a profile as text. Pure."""

from __future__ import annotations

from ortflow.launchers.report.profile import Profile, Row
from ortflow.launchers.view.lines import counted, duration

HEADS = ("CALLS", "TIME", "SHARE", "BYTES", "RATE", "OF LIMIT")


def head(profile: Profile) -> str:
    """One sentence about the window."""
    last = profile.first + profile.steps - 1
    ranks = counted(len(profile.ranks), "rank")
    missing = [] if profile.complete else [f"the window to step {profile.planned[1]} is incomplete"]
    if len(profile.ranks) < profile.world_size:
        missing.append(f"{profile.world_size - len(profile.ranks)} of {profile.world_size} ranks have no step")
    if not profile.nodes:
        missing.append("no operators were recorded")
    if profile.queued:
        missing.append("operators have the time in which the host queued them, and the GPU computes them later")
    if profile.clock_error is not None and len(profile.ranks) > 1:
        missing.append(f"clocks agree within {1e6 * profile.clock_error:.0f} us")
    if profile.mfu is not None and profile.peak is not None:
        missing.append(f"MFU {profile.mfu:.1%} of {profile.peak[0] / 1e9:.3g} GFLOP/s, {profile.peak[1]}")
    average = profile.wall / len(profile.ranks) / profile.steps
    text = f"steps {profile.first} to {last} of {ranks}: {_step_time(average)} a step"
    return "; ".join([text, *missing])


def table(profile: Profile, by: str, most: int) -> list[tuple[str, ...]]:
    """Heads and rows; calls, time and bytes are those of one step of one rank."""
    other = "MODULE" if by == "operator" else "OPERATOR"
    all_rows = profile.rows(by)
    shown = all_rows[:most]
    rows = [(by.upper(), *HEADS, f"MOST IN {other}"), *(_row(profile, row) for row in shown)]
    rest = all_rows[most:]
    if rest:
        remainder = Row(f"{len(rest)} more", seconds=sum(row.seconds for row in rest), kind="other")
        rows.append(_row(profile, remainder))
    return rows


def _row(profile: Profile, row: Row) -> tuple[str, ...]:
    rank_steps = len(profile.ranks) * profile.steps
    reached, rate = profile.of_limit(row), row.rate
    return (
        row.name, f"{row.calls / rank_steps:.0f}" if row.calls else "", f"{1000 * row.seconds / rank_steps:.3f} ms",
        f"{row.seconds / profile.wall:.1%}", scaled(row.bytes / rank_steps, "B") if row.bytes else "",
        "" if rate is None else scaled(*rate),
        "" if reached is None else f"{min(reached, 1.0):.0%}" + ("+" if reached > 1 else ""), row.largest,
    )  # fmt: skip


def _step_time(seconds: float) -> str:
    """Three digits: two windows of steps are compared by it."""
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g} us"
    return f"{seconds:.3g} s" if seconds < 60 else duration(seconds)


def scaled(value: float, unit: str) -> str:
    """A quantity with three digits and the unit's prefix: 12.3 GB, 512 B."""
    for prefix, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.0f} {unit}"
