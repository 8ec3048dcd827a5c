"""Whether the steps of `monitor.profile` are in order. Pure; called by `check`."""

from __future__ import annotations

from collections.abc import Iterator

from ortflow.workflow.spec.problem import Problem
from ortflow.workflow.spec.run import RunSpec

MOST = 1000
"""Steps of a window: all of its operators are held in memory until it ends."""


def check_profile(spec: RunSpec) -> Iterator[Problem]:
    """Report a window that ends before it begins, or is too long."""
    window = spec.monitor.profile
    if window is None:
        return
    path = ("monitor", "profile", "to")
    if window.to < window.first:
        yield Problem(path, f"is {window.to}, before the first step {window.first}", f"give at least {window.first}")
    elif window.to - window.first >= MOST:
        fix = f"give at most {window.first + MOST - 1}; 10 steps are enough"
        yield Problem(path, f"records {window.to - window.first + 1} steps", fix)
