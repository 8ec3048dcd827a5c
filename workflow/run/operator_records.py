"""What a trainer records of its operators for `monitor.profile`. Plain data: imports no runtime."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

RUN = "model_run"
"""Operator of the run of a whole graph: ONNX Runtime's name in its records."""


@dataclass(frozen=True)
class Node:
    """One run of a node, or of a whole graph."""

    graph: str
    name: str
    """As the runtime names it; `RUN` for the graph as a whole."""
    module: str
    """The user's module that it belongs to, or the name of its forward node; empty if unknown."""
    operator: str
    start: float
    """Seconds of `time.perf_counter`."""
    seconds: float
    provider: str = ""
    bytes: int = 0
    """Read and written."""
    flops: int | None = 0
    """Multiplications and additions; None if the shapes do not determine them."""
    inputs: tuple[tuple[int, ...], ...] = ()
    """Shapes."""


class Limits(NamedTuple):
    """How fast one rank can be."""

    flops: float
    """Operations a second of the fastest matrix product in fp32."""
    bytes: float
    """Bytes a second that an addition of long vectors reads and writes."""


class Recording(Protocol):
    """Recorders that are at work until `end`."""

    def end(self) -> list[Node]:
        """Stop, and return what was recorded, in the order of its start. Raises OSError or ValueError."""

    def limits(self) -> Limits | None:
        """Measure what this rank's device can do at most; None if that is not possible. May raise any error."""
