"""The traces of a program's ranks, as `ortflow.program.trace` writes them. Reads files; judges nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ortflow.workflow.run.strike import struck_at

RANDOM = {
    "python": "python generator",
    "numpy": "numpy generator",
    "torch": "torch generator",
    "cuda": "cuda generator",
}
"""Kinds of the process's own generators, by the trace's name."""
REGISTERED = "registered"


class Entry(NamedTuple):
    """The state of one variable, or of one part of an object."""

    kind: str
    digest: str
    shown: str = ""
    file: str = ""


@dataclass(frozen=True)
class Line:
    """A rank before a step: everything that is the state after `step` steps, and the batch of the next one."""

    rank: int
    step: int
    batch: str | None = None
    logged: Mapping[str, str] = field(default_factory=dict)
    """Digests of the values that the program reported for step `step`."""
    state: Mapping[str, Entry] = field(default_factory=dict)
    """By key: `random:NAME`, `registered:NAME.PATH`, or `FILE:FUNCTION:PATH` of a variable."""


Steps = dict[int, Line]
"""The lines of one rank in one attempt, by step."""


@dataclass(frozen=True)
class Trace:
    """The lines of one run."""

    attempts: Mapping[int, Mapping[int, Steps]]
    """By attempt and rank."""
    struck: int | None = None
    """The step after which a rank was sent a signal; None if none was."""

    @property
    def first(self) -> Mapping[int, Steps]:
        """The ranks of the first attempt."""
        return self.attempts.get(0, {})

    @property
    def last(self) -> Mapping[int, Steps]:
        """The ranks of the last attempt."""
        return self.attempts[max(self.attempts)] if self.attempts else {}


def read_trace(folder: Path) -> Trace:
    """Read what the ranks have written so far. Raises OSError."""
    attempts: dict[int, dict[int, Steps]] = {}
    for path in sorted(folder.glob("rank-*.jsonl")):
        for record in _records(path):
            ranks = attempts.setdefault(record["attempt"], {})
            ranks.setdefault(record["rank"], {})[record["step"]] = parse(record)
    return Trace(attempts, struck_at(folder))


def parse(record: Mapping[str, Any]) -> Line:
    """A line of a trace. Pure."""
    state = {f"random:{name}": Entry(RANDOM[name], value) for name, value in record["random"].items()}
    state.update({f"registered:{path}": Entry(REGISTERED, value) for path, value in record["registered"].items()})
    state.update({key: Entry(*entry) for key, entry in record["living"].items()})
    return Line(record["rank"], record["step"], record["batch"], record["logged"], state)


def _records(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_bytes().splitlines():
        try:
            yield json.loads(line)
        except (ValueError, RecursionError):  # torn: the rank was killed while it wrote
            continue
