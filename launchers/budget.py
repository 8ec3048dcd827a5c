"""Whether a run is started again, and after what pause. Pure.

Two budgets, counted over all launchers of a run since it was last given up or resumed by hand: failures and
preemptions. Progress between two failures renews neither: a run that fails every hour is looked at after three.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ortflow.launchers.records import Outcome, Used

if TYPE_CHECKING:
    from ortflow.workflow.spec.run import Backoff, Restart

FRUITLESS = 5
"""Attempts that may end in a row without a step: more is no bad luck but, say, a time limit that is too short."""


@dataclass(frozen=True)
class Decision:
    """What follows an attempt."""

    again: bool
    pause: float = 0.0
    """Seconds before the next attempt."""
    why: str = ""
    """For people."""


def decide(outcome: Outcome, used: Used, restart: Restart, fruitless: int = 0, *, counts: bool = True) -> Decision:
    """What follows an attempt that nobody asked to stop; `used` counts it already.

    `fruitless` attempts in a row, this one among them, did not get beyond the one before. `counts` False: what looks
    like a preemption is none, but a time limit, or a signal by hand.
    """
    if outcome is Outcome.FINISHED:
        return Decision(False, why="done")
    if outcome is Outcome.USER_ERROR:
        return Decision(False, why="wrong input is not tried again")
    if outcome in (Outcome.PREEMPTED, Outcome.LOST) and fruitless >= FRUITLESS:
        return Decision(False, why=f"{fruitless} attempts in a row ended before a step was done")
    if outcome is Outcome.LOST or (outcome is Outcome.PREEMPTED and not counts):
        return Decision(True, restart.backoff.first, "that counts against no budget")
    if outcome is Outcome.PREEMPTED:
        if restart.preemptions is not None and used.preemptions > restart.preemptions:
            return Decision(False, why=f"the budget of {_times(restart.preemptions, 'preemption')} is spent")
        return Decision(True, restart.backoff.first, f"preemption {used.preemptions}")
    if used.failures > restart.failures:
        return Decision(False, why=f"the budget of {_times(restart.failures, 'failure')} is spent")
    return Decision(True, pause(restart.backoff, used.failures), f"failure {used.failures} of {restart.failures}")


def pause(backoff: Backoff, failures: int) -> float:
    """Seconds before the restart that follows so many failures: doubled each time, up to the limit."""
    return float(min(backoff.first * 2.0 ** min(failures - 1, 60), backoff.limit))


def _times(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")
