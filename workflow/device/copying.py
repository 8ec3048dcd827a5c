"""How a state is copied before it is written to disk, while training continues. Chosen by the device that has it."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass

from ortflow.workflow.memory import KEPT

DUTY = 0.01
"""Share of one core that may be used for writing during training, when every core computes."""


@dataclass(frozen=True)
class Copying:
    """See the module. By default that of a state in the host's memory."""

    kept: int = KEPT
    """Bytes that are copied at most; what is before them is written from where it lies, and training waits for that."""
    duty: float = DUTY
    """Share of one core that may be used for writing."""
    lock: Callable[[mmap.mmap], object] | None = None
    """Makes copies from a device into this memory fast, as long as the object that it returns lives."""
