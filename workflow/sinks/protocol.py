"""What a sink is. A package provides one as an entry point of the group `ortflow.sinks`: a callable that returns it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

GROUP = "ortflow.sinks"

State = Literal["finished", "preempted", "failed"]


@dataclass(frozen=True)
class Run:
    """The run whose metrics a sink gets."""

    name: str
    identity: str
    """The same in all attempts of a run, and different for another run."""
    folder: Path
    """The run directory."""
    attempt: int
    """From 0."""
    settings: Mapping[str, Any]
    """The run file, without null values."""


class Sink(Protocol):
    """One service. Its methods are called in one thread, which no step waits for; they may block or raise."""

    def begin(self, run: Run) -> None:
        """An attempt has begun. A run that has been restarted continues what its earlier attempts have sent."""
        ...

    def write(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """Metrics of a step: finite numbers by name; `time` in seconds since 1970.

        A resumed run repeats the steps after its checkpoint.
        """
        ...

    def end(self, state: State) -> None:
        """The attempt has ended."""
        ...
