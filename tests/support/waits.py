"""Waiting for what a test looks at. A wait that succeeds costs nothing: its limit is that of a busy machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

PATIENCE = 120.0
"""Seconds after which what a test waits for will not come."""


def wait_until(
    condition: Callable[[], Any],
    timeout: float = PATIENCE,
    alive: Callable[[], bool] = lambda: True,
    output: Callable[[], object] = str,
) -> None:
    """Wait until a condition is true, for `timeout` seconds at most, while `alive` is true.

    `output` is what an ended process has said: a traceback in it says that the failure is not bad luck.
    """
    end, pause = time.monotonic() + timeout, 0.001
    while not condition():
        assert time.monotonic() < end, "timed out"
        # What it waits for may have come, and all have ended, since the condition was looked at.
        assert alive() or condition(), f"ended before: {output()}"
        time.sleep(pause)
        pause = min(2 * pause, 0.02)
