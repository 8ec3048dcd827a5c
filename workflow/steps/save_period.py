"""How often a run saves by the clock. Pure.

A run whose file gives no period saves every few minutes all the same: a killed run must not lose hours.
"""

from __future__ import annotations

from ortflow.workflow.spec.checkpoint import CheckpointSection

DEFAULT_SECONDS = 300.0
"""Period of a run whose file gives none."""
LARGEST_SHARE = 0.05
"""Largest share of the time for which a save may be in progress by default: on a slow disk the period is longer."""


def save_period(section: CheckpointSection, save_seconds: float) -> float | None:
    """Seconds between two saves if the newest one took `save_seconds` until it was committed; None for steps alone."""
    if section.every_seconds is not None:
        return section.every_seconds
    if section.every_steps is not None:
        return None
    return max(DEFAULT_SECONDS, save_seconds / LARGEST_SHARE)


def save_message(section: CheckpointSection, *, by_program: bool = False) -> str:
    """When a run saves, for the first lines of its log. A program does so only through `ortflow.program.start`."""
    periods = [] if section.every_steps is None else [f"every {section.every_steps} steps"]
    if (seconds := save_period(section, 0.0)) is not None:
        periods.append(f"every {seconds:g} s")
    default = section.every_steps is None and section.every_seconds is None
    # A program's library saves at the period itself.
    share = "" if by_program else f"; less often if that took more than {LARGEST_SHARE:.0%} of the time"
    slower = f" (the default{share})" if default else ""
    condition = "if the program uses ortflow.program.start, " if by_program else ""
    return f"{condition}a checkpoint is saved {' and '.join(periods)}{slower}, on a request to stop and at the end"
