"""Reads a run directory for the report: status, account, restarts, ranks and curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from ortflow.launchers.attempts.locks import holder_of
from ortflow.launchers.report.accounting import Account, account, newest_checkpoint
from ortflow.launchers.report.causes import Cause
from ortflow.launchers.report.clock import corrected
from ortflow.launchers.report.profile import Profile, read
from ortflow.launchers.report.rank_records import Ranks, Waits, read_ranks, waits_of
from ortflow.launchers.report.restarts import Restart, restarts
from ortflow.launchers.report.stragglers import StepTimes, Straggler, step_times, straggler
from ortflow.launchers.report.timeline import MICRO
from ortflow.launchers.status import RunStatus, read_status
from ortflow.workflow.run.record import ATTEMPTS, EVENTS, read_records
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.system.files import read_whole

MOST_RANKS = 100_000
"""No run has more; a damaged record may say so."""


@dataclass
class Risk:
    """Work that would be repeated if the run were killed now."""

    steps: int = 0
    seconds: float = 0.0
    checkpoint: int | None = None
    """Step of the newest checkpoint."""
    age: float | None = None
    """Seconds since it was committed."""


@dataclass
class Survey:
    """All that a report shows of a run."""

    status: RunStatus
    account: Account
    restarts: list[Restart] = field(default_factory=list)
    risk: Risk | None = None
    """None if the run is not active."""
    ranks: Ranks = field(default_factory=lambda: Ranks([], False))
    waits: Waits = field(default_factory=Waits)
    times: list[StepTimes] = field(default_factory=list)
    """Of the ranks that measure the parts of their steps."""
    straggler: Straggler | None = None
    events: list[dict[str, Any]] = field(default_factory=list)
    """Rank 0's."""
    records: list[dict[str, Any]] = field(default_factory=list)
    """Those of attempts.jsonl."""
    budget: tuple[int | None, int | None] = (None, None)
    """The most failures and preemptions; None if unknown, or without a limit."""
    user: str | None = None
    """Who owns the run directory."""
    profile: Profile | None = None
    """The newest window of `monitor.profile`."""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "run": self.status.name,
            "directory": self.status.directory,
            "state": self.status.state.value,
            "user": self.user,
            "step": self.status.step,
            "total_steps": self.status.total_steps,
            "loss": self.status.loss,
            "evaluation": self.status.evaluation,
            **self.account.to_json(),
            "restarts": [restart.to_json() for restart in self.restarts],
            "preflight": next((event for event in reversed(self.events) if event["event"] == "preflight"), None),
            "excluded_nodes": self.status.excluded_nodes,
            "at_risk": None if self.risk is None else vars(self.risk),
            "straggler": None if self.straggler is None else self.straggler.to_json(),
            "profile": None if self.profile is None else self.profile.to_json(),
            "memory": self.ranks.memory(),
            "ranks": [{**vars(rank_times), "compute": rank_times.compute} for rank_times in self.times],
            "data_wait": {
                "slowest_rank": self.waits.slowest, "share": self.waits.share, "steps_compared": self.waits.steps
            },
        }  # fmt: skip


def survey(run: RunDir, now: float, *, status: RunStatus | None = None, all_ranks: bool = True) -> Survey:
    """Read a run. Raises OSError if its records cannot be read at all.

    Parameters
    ----------
    run
        The run.
    now
        Unix time.
    status
        The launcher's, if already known; it also says whether the run is active.
    all_ranks
        Read the files of all ranks, not only rank 0's.
    """
    records, _ = read_records(run.attempts, ATTEMPTS)
    alive = status.state.active if status is not None else holder_of(run.lock) is not None
    status = status or read_status(run, records=records, alive=alive)
    notes = [status.damaged] if status.damaged else []
    try:
        events, _ = read_records(run.events(0), EVENTS)
    except OSError as error:
        events, notes = [], [*notes, f"{error.filename}: {error.strerror}"]
    clock = corrected(records, events)
    records, events, notes = clock.records, clock.events, [*notes, *clock.notes]
    newest = max((float(event["time"]) for event in events if "time" in event), default=now)
    now = max(now - clock.ahead, newest) if clock.ahead else now
    steps = sum(event["event"] == "step" for event in events)
    attempts = sorted({int(record["attempt"]) for record in records if record.get("event") == "start"})
    sizes = [int(record["world_size"]) for record in (*records, *events) if "world_size" in record]
    world = min(max(sizes, default=1), MOST_RANKS) if all_ranks else 1
    ranks = read_ranks(run, world, attempts, max((e["step"] for e in events if e["event"] == "step"), default=0))
    waits = waits_of(ranks, steps)
    run_account = account(records, events, now=now, alive=alive, waits=_by_attempt(waits, events, steps))
    run_account.notes = [*notes, *run_account.notes]
    if records and ranks.missing:
        run_account.notes.append(_missing(ranks.missing))
    if ranks.sampled and waits.steps:
        run_account.notes.append(f"waits for data are estimated from {waits.steps} of {steps} steps of each rank")
    limits = budget(run)
    all_times = (step_times(record.rank, record.seconds, record.comm, record.waits) for record in ranks.records)
    times = [rank_times for rank_times in all_times if rank_times is not None]
    profile = None
    if all_ranks:
        try:
            profile = read(run.root)
        except OSError as error:
            run_account.notes.append(f"{error.filename}: {error.strerror}")
    return Survey(
        status=status,
        account=run_account,
        restarts=restarts(run_account, records, events, ranks.host, limits),
        risk=at_risk(events, run_account, now) if status.state.active else None,
        ranks=ranks,
        waits=waits,
        times=times,
        straggler=straggler(times),
        events=events,
        records=records,
        budget=limits,
        user=_owner(run),
        profile=profile,
    )


def _missing(ranks: Sequence[int]) -> str:
    listed = ", ".join(map(str, ranks[:5])) + (f" and {len(ranks) - 5} more" if len(ranks) > 5 else "")
    return f"no record of rank{'s' if len(ranks) > 1 else ''} {listed}"


def _by_attempt(waits: Waits, events: Sequence[Mapping[str, Any]], steps: int) -> dict[int, int]:
    """The excess of the slowest rank's waits, divided by the number of each attempt's steps."""
    counts: dict[int, int] = {}
    for event in events:
        if event["event"] == "step":
            attempt = int(event.get("attempt", 0))
            counts[attempt] = counts.get(attempt, 0) + 1
    return {attempt: waits.excess * count // steps for attempt, count in counts.items()}


def at_risk(events: Sequence[Mapping[str, Any]], run_account: Account, now: float) -> Risk:
    """The steps after the newest checkpoint. Pure."""
    saved = newest_checkpoint(events)
    if saved is None:
        return Risk()
    steps = [event for event in events if event["event"] == "step" and event["step"] > saved]
    seconds = sum(event.get("seconds") or 0.0 for event in steps)
    saves = [event for event in events if event["event"] == "checkpoint" and event["step"] == saved]
    age = None
    if saves and "time" in saves[-1]:
        line = run_account.lines.get(int(saves[-1].get("attempt", 0)))
        age = max(0.0, now - saves[-1]["time"] - (line.shift / MICRO if line else 0.0))
    return Risk(len(steps), seconds, saved or None, age)


def budget(run: RunDir) -> tuple[int | None, int | None]:
    """The limits of failures and preemptions in the run file; None for what is unknown or has no limit."""
    values = run_values(run).get("restart")
    limits = values if isinstance(values, dict) else {}
    failures, preemptions = limits.get("failures", None), limits.get("preemptions", None)
    return (failures if isinstance(failures, int) else None, preemptions if isinstance(preemptions, int) else None)


def run_values(run: RunDir) -> dict[str, Any]:
    """The run file as plain data; empty if it cannot be read."""
    try:
        values = yaml.load(read_whole(run.run_file, 1 << 20), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def _owner(run: RunDir) -> str | None:
    try:
        return run.root.owner()
    except (OSError, KeyError, NotImplementedError):
        return None


def productive(run_survey: Survey) -> float:
    """Seconds of productive steps."""
    return run_survey.account.totals[Cause.STEP] / MICRO
