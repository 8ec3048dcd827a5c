"""Accounts of several runs added up: by run, by user, by week. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from ortflow.launchers.report.accounting import Account
from ortflow.launchers.report.causes import Cause
from ortflow.launchers.report.survey import Survey
from ortflow.launchers.report.timeline import MICRO, Segment
from ortflow.workflow.errors import UserError

UNITS = {"m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
_PERIOD = re.compile(r"(\d+(?:\.\d+)?)([mhdw])")


@dataclass
class Sum:
    """Time by cause, in microseconds."""

    totals: dict[Cause, int] = field(default_factory=lambda: dict.fromkeys(Cause, 0))
    runs: int = 0

    @property
    def wall(self) -> int:
        """All of it."""
        return sum(self.totals.values())

    @property
    def goodput(self) -> float | None:
        """The fraction in productive steps."""
        return self.totals[Cause.STEP] / self.wall if self.wall else None

    def add(self, totals: dict[Cause, int]) -> None:
        """Add a run."""
        self.runs += 1
        for cause, value in totals.items():
            self.totals[cause] += value

    def to_json(self) -> dict[str, Any]:
        """Plain data, in seconds."""
        return {
            "runs": self.runs,
            "wall_seconds": self.wall / MICRO,
            "goodput": self.goodput,
            "seconds": {cause.value: self.totals[cause] / MICRO for cause in Cause},
        }


def seconds_of(period: str) -> float:
    """The seconds of a period such as 7d; raises UserError for any other text."""
    match = _PERIOD.fullmatch(period.strip())
    if match is None:
        raise UserError(
            f"{period!r} is not a period", where="--since", fix="give a number and m, h, d or w, such as 7d"
        )
    return float(match[1]) * UNITS[match[2]]


def since(account: Account, begin: int | None, end: int | None = None) -> dict[Cause, int]:
    """Time by cause between two moments, in microseconds; waits within steps in proportion to the steps."""
    totals = dict.fromkeys(Cause, 0)
    for segment in account.segments:
        totals[segment.cause] += _within(segment, begin, end)
    steps = sum(segment.end - segment.start for segment in account.segments if segment.cause is Cause.STEP)
    inside = totals[Cause.STEP]
    if not steps or not inside:
        return totals
    for cause in (Cause.SAVE, Cause.DATA_WAIT):
        all_time = sum(segment.end - segment.start for segment in account.segments if segment.cause is cause)
        moved = min((account.totals[cause] - all_time) * inside // steps, totals[Cause.STEP])
        totals[cause] += moved
        totals[Cause.STEP] -= moved
    return totals


def _within(segment: Segment, begin: int | None, end: int | None) -> int:
    first = segment.start if begin is None else max(segment.start, begin)
    last = segment.end if end is None else min(segment.end, end)
    return max(0, last - first)


def by_user(runs: Iterable[tuple[Survey, dict[Cause, int]]]) -> dict[str, Sum]:
    """The sums of each owner's runs, by name."""
    sums: dict[str, Sum] = {}
    for run_survey, totals in runs:
        sums.setdefault(run_survey.user or "unknown", Sum()).add(totals)
    return dict(sorted(sums.items()))


def by_week(runs: Sequence[Survey], begin: int | None) -> dict[str, Sum]:
    """The sums of each ISO week in UTC, such as 2026-W48, by name; a run of two weeks is in both."""
    sums: dict[str, Sum] = {}
    for run in runs:
        first = max((run.account.start, begin or 0))
        for week in _weeks(first, run.account.end):
            start, end = week * WEEK + MONDAY, (week + 1) * WEEK + MONDAY
            totals = since(run.account, max(start, first), end)
            if any(totals.values()):
                sums.setdefault(_name(start), Sum()).add(totals)
    return dict(sorted(sums.items()))


WEEK = 7 * 86400 * MICRO
MONDAY = 4 * 86400 * MICRO
"""The first Monday of Unix time."""


def _weeks(start: int, end: int) -> range:
    return range((start - MONDAY) // WEEK, (end - MONDAY) // WEEK + 1) if end > start else range(0)


def _name(start: int) -> str:
    return datetime.fromtimestamp(start // MICRO, timezone.utc).strftime("%G-W%V")
