"""The run file's `restart` section: the budgets of failures and preemptions, and the pauses."""

from __future__ import annotations

from ortflow.workflow.spec.base import Count, NonNegativeFloat, PositiveFloat, Section


class Backoff(Section):
    """Pause before a restart: doubled each time."""

    first: NonNegativeFloat = 1.0
    """Seconds before the first restart."""
    limit: NonNegativeFloat = 60.0
    """Longest pause in seconds."""


class Restart(Section):
    """How often a run is restarted, and how soon."""

    failures: Count = 3
    """Number of failures after which the run is restarted; the next one ends it."""
    preemptions: Count | None = None
    """Number of preemptions after which the run is restarted; no limit by default."""
    hung_seconds: PositiveFloat | None = 1800.0
    """Seconds without a heartbeat from rank 0 after which an attempt counts as hung, which is a failure; null disables
    the check. Ranks that start have at least 120 seconds until the first heartbeat."""
    shrink_seconds: NonNegativeFloat = 60.0
    """Seconds that an elastic run waits for missing nodes before it continues with fewer; Slurm decides that itself."""
    grow_seconds: PositiveFloat = 300.0
    """Seconds that an elastic run trains with fewer nodes before it saves and restarts with those that are back."""
    backoff: Backoff = Backoff.model_construct()
    """Pause before a restart."""
