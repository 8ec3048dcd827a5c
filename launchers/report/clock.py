"""Times of records as if nobody had set the clock of the machine while the run went on. Pure.

Steps are measured by a clock that nobody sets. If a step of half a second is recorded a day after the event before it,
the time of day was set forward, or the machine slept: in neither case did the run wait for anything. If an event is
older than the one before it in its file, the time of day was set back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ortflow.launchers.view.lines import duration

Record = dict[str, Any]
FORWARD = 900.0
"""Seconds that nothing explains, from which on the clock was set forward: waits for a full disk end before."""
BACK = 2.0
"""Seconds from which on it was set back."""
NEAR = 60.0
"""Seconds between an attempt's last event and the launcher's record of its end, if both are by the same clock."""
_MEASURED = ("step", "evaluation")
"""Events whose `seconds` are all that has happened since the event before, in the loop of training."""


@dataclass(frozen=True)
class Corrected:
    """Records and rank 0's events, by a clock that was not set."""

    records: list[Record]
    events: list[Record]
    ahead: float = 0.0
    """Seconds that the clock is ahead of it at the end."""
    notes: tuple[str, ...] = ()


def corrected(records: Sequence[Record], events: Sequence[Record]) -> Corrected:
    """The records of attempts.jsonl and rank 0's events, both in the order of their files."""
    shifted, notes, ahead, last = list[Record](), list[str](), 0.0, dict[int, tuple[float, float]]()
    before: Record | None = None
    usual: float | None = None
    """The time before an event that was far ahead for no known reason: it may be that event's alone."""
    for event in events:
        time = event.get("time")
        if isinstance(time, (int, float)):
            attempt = int(event.get("attempt", 0))
            if before is not None and int(before.get("attempt", 0)) == attempt:
                passed = time - before["time"]
                set_on = passed - float(event.get("seconds") or 0.0) if event["event"] in _MEASURED else 0.0
                if event.get("seconds") is not None and set_on > FORWARD:
                    ahead += set_on
                    notes.append(
                        f"the clock was set forward by {duration(set_on)}, or the machine slept, before step "
                        f"{event.get('step')}: this time is not counted"
                    )
                elif passed > FORWARD and "seconds" not in event:
                    usual = float(before["time"])
                elif passed < -BACK and usual is not None and time >= usual - BACK:
                    usual = None
                elif passed < -BACK:
                    ahead += passed
                    notes.append(f"the clock was set back by {duration(-passed)}: later times are corrected")
            before = event
            last[attempt] = (time, ahead)
            shifted.append({**event, "time": time - ahead} if ahead else event)
        else:
            shifted.append(event)
    if not notes:
        return Corrected(list(records), list(events))
    return Corrected([_moved(record, last) for record in records], shifted, ahead, tuple(notes))


def _moved(record: Record, last: Mapping[int, tuple[float, float]]) -> Record:
    """A record of the launcher behind the newest event before it, if its clock was the same one."""
    time = record.get("time")
    if not isinstance(time, (int, float)) or record.get("event") not in ("start", "end", "stop"):
        return record
    number = int(record.get("attempt", max(last, default=0))) - (record["event"] == "start")
    clock = last.get(number)
    if clock is None:
        return record
    moment, ahead = clock
    return {**record, "time": time - ahead} if ahead and time >= moment - NEAR else record
