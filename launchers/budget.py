"""Whether a run is restarted, and after what delay. Pure.

Two budgets, counted over all launchers of a run since it last gave up or was resumed by hand: failures and
preemptions. Progress resets neither: with a budget of three, a run that fails every hour stops after three hours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ortflow.launchers.records import Outcome, Used
from ortflow.launchers.view.lines import counted

if TYPE_CHECKING:
    from ortflow.workflow.spec.restart import Backoff, Restart

MOST_WITHOUT_STEP = 5
"""Attempts in a row that may end without a step. More indicate a lasting cause, such as too short a time limit."""


@dataclass(frozen=True)
class Decision:
    """What happens after an attempt."""

    again: bool
    pause: float = 0.0
    """Seconds before the next attempt."""
    reason: str = ""
    """The reason, for messages."""


def decide(outcome: Outcome, used: Used, restart: Restart, without_step: int = 0, *, counts: bool = True) -> Decision:
    """Decide what happens after an attempt that was not asked to stop; `used` already includes it.

    `without_step`: attempts in a row, including this one, that ended before a step was done. `counts` False: what looks
    like a preemption is a time limit or a signal sent by hand; what looks like a failure is a full disk.
    """
    if outcome is Outcome.FINISHED:
        return Decision(False, reason="done")
    if outcome is Outcome.USER_ERROR:
        return Decision(False, reason="wrong input is not tried again")
    if (outcome in (Outcome.PREEMPTED, Outcome.LOST) or not counts) and without_step >= MOST_WITHOUT_STEP:
        return Decision(False, reason=f"{without_step} attempts in a row ended before a step was done")
    if outcome is Outcome.LOST or not counts:
        return Decision(True, restart.backoff.first, "that counts against no budget")
    if outcome is Outcome.PREEMPTED:
        if restart.preemptions is not None and used.preemptions > restart.preemptions:
            return Decision(False, reason=f"the budget of {counted(restart.preemptions, 'preemption')} is spent")
        return Decision(True, restart.backoff.first, f"preemption {used.preemptions}")
    if used.failures > restart.failures:
        return Decision(False, reason=f"the budget of {counted(restart.failures, 'failure')} is spent")
    return Decision(True, pause(restart.backoff, used.failures), f"failure {used.failures} of {restart.failures}")


def pause(backoff: Backoff, failures: int) -> float:
    """Seconds before the restart after so many failures: doubled each time, up to the limit."""
    return float(min(backoff.first * 2.0 ** min(failures - 1, 60), backoff.limit))
