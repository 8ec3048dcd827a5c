"""How long ago something was recorded, measured by one machine's monotonic clock, or None if that is unknown.

The clocks of two machines may be hours apart, and one machine's may be set. A record therefore carries which boot of
which machine it comes from, and how long that had run. Within one boot the difference is exact. After a
reboot of the same machine the record counts as old. Nothing follows from a record of another machine.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ortflow.workflow.system.clock import Clock

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def stamp(clock: Clock) -> dict[str, Any]:
    """Fields of a record that identify the moment at which it is made."""
    return {"host": socket.gethostname(), "boot": _boot(), "uptime": clock.monotonic()}


def seconds_since(record: Mapping[str, Any], clock: Clock) -> float | None:
    """Seconds since a record with a `stamp` was made; infinite if a reboot lies between, None if this cannot be known
    here.
    """
    boot, uptime = record.get("boot"), record.get("uptime")
    if not boot or not isinstance(uptime, int | float):
        return None
    if boot == _boot():
        return max(0.0, clock.monotonic() - uptime)
    return math.inf if record.get("host") == socket.gethostname() else None


def _boot() -> str:
    """The id of the kernel's start, or nothing if it has none."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""
