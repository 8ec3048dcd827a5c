"""The disruptions of a run: what each cost, and what is left of its budgets. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ortflow.launchers.records import used
from ortflow.launchers.report.accounting import Account, Records
from ortflow.launchers.report.timeline import MICRO


@dataclass(frozen=True)
class Restart:
    """One end of an attempt that was not the run's end."""

    attempt: int
    """The attempt that ended."""
    time: float | None
    outcome: str
    cause: str
    node: str | None
    """Where the rank that failed ran."""
    counts: bool
    """Whether it counts against a budget."""
    failures: int
    """Used of the budget, after this end."""
    preemptions: int
    failures_left: int | None
    """None if the budget is unknown."""
    preemptions_left: int | None
    """None without a limit."""
    steps_lost: int
    seconds_lost: float
    """Of steps that were run again."""
    seconds_to_first_step: float | None
    """From the end to the end of the first step of the next attempt; None if there is none yet."""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


Host = Callable[[int | None, int], "str | None"]


def restarts(
    account: Account, records: Records, events: Records, host: Host, budget: tuple[int | None, int | None]
) -> list[Restart]:
    """The disruptions, oldest first; `budget` has the limits of failures and preemptions."""
    disruptions = []
    for place, record in enumerate(records):
        if record.get("event") != "end" or record.get("outcome") in ("finished", "user_error"):
            continue
        if record.get("next") == "stop" and not any(later.get("event") == "start" for later in records[place + 1 :]):
            continue  # the run's own end: the state says its cause
        number = int(record["attempt"])
        total = used([dict(record) for record in records[: place + 1]])
        steps, seconds = lost_by(number, events)
        outcome = str(record.get("outcome") or "")
        disruptions.append(
            Restart(
                attempt=number,
                time=record.get("time"),
                outcome=outcome,
                cause=str(record.get("cause") or outcome),
                node=host(record.get("rank"), number),
                counts=outcome in ("failure", "preempted") and record.get("counts", True) is not False,
                failures=total.failures,
                preemptions=total.preemptions,
                failures_left=None if budget[0] is None else max(0, budget[0] - total.failures),
                preemptions_left=None if budget[1] is None else max(0, budget[1] - total.preemptions),
                steps_lost=steps,
                seconds_lost=seconds,
                seconds_to_first_step=_first_step(account, number),
            )
        )
    return disruptions


def lost_by(attempt: int, events: Sequence[Mapping[str, Any]]) -> tuple[int, float]:
    """Steps and seconds of an attempt that the next one removed from the record, to run them again."""
    rewound = next(
        (event for event in events if event["event"] == "rewind" and event.get("attempt") == attempt + 1), None
    )
    if rewound is None:
        return 0, 0.0
    spans = rewound.get("spans")
    if isinstance(spans, list):
        seconds = sum(span[2] - span[1] for span in spans if isinstance(span, list) and len(span) == 3)
    else:
        seconds = rewound.get("seconds") or 0.0
    return max(0, int(rewound["from_step"]) - int(rewound["to_step"])), seconds


def _first_step(account: Account, number: int) -> float | None:
    ended = next((attempt.end for attempt in account.attempts if attempt.number == number), None)
    for attempt in account.attempts:
        line = account.lines[attempt.number]
        if attempt.number > number and line.first_step is not None and ended is not None:
            return (line.first_step - ended) / MICRO
    return None
