"""The best evaluation of a run, from rank 0's events. Read only."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ortflow.launchers.view.progress import metrics
from ortflow.workflow.run.record import EVENTS, parse
from ortflow.workflow.spec.metrics import METRICS, higher_is_better
from ortflow.workflow.system.files import open_regular

MOST = 256 << 20
"""Bytes of events up to which they are searched: `ortflow list` shows hundreds of runs."""
CHUNK = 8 << 20
_LINE = re.compile(rb'^\{"event":"evaluation".*$', re.MULTILINE)


@dataclass(frozen=True)
class Best:
    """An evaluation's best value."""

    metric: str
    value: float
    step: int


def main_metric(evaluation: Mapping[str, Any]) -> str | None:
    """The metric by which a run is judged: its first one besides losses, else its first loss; None without one.

    Only those of which is known whether higher or lower is better; `SET/NAME` is the metric NAME of one set.
    """
    metric_names = [name for name in evaluation if _kind(name) in METRICS]
    losses = [name for name in evaluation if _kind(name) == "loss"]
    return next(iter([*metric_names, *losses]), None)


def _kind(name: str) -> str:
    return name.rpartition("/")[2]


def best_of(path: Path, metric: str) -> Best | None:
    """The best value of a metric in a file of events; None without one, or if the file is too large to be searched."""
    sign = 1.0 if higher_is_better(_kind(metric)) else -1.0
    best: Best | None = None
    for record in evaluations(path):
        value = metrics(record).get(metric)
        if value is not None and (best is None or sign * value > sign * best.value):
            best = Best(metric, value, int(record["step"]))
    return best


def evaluations(path: Path) -> Iterator[dict[str, Any]]:
    """The evaluations of a file of events; none if it is too large to be searched."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            if os.fstat(file.fileno()).st_size > MOST:
                return
            while data := file.read(CHUNK):
                for line in _LINE.findall(data + file.readline()):
                    record = parse(line, EVENTS)
                    if record is not None:
                        yield record
    except OSError:
        return
