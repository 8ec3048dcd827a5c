"""Caches the check of the gradient before the first step.

Passed checks are recorded by hash in a cache folder of the user, for every run with the same graphs, kernels and
runtime.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

from ortflow.workflow.data.inputs import BatchInput
from ortflow.workflow.layout import FlatIndex
from ortflow.workflow.sessions.failures import RejectedBatch
from ortflow.workflow.system.cache_folders import cache_folders
from ortflow.workflow.trainer import MicroBatch, Report


@dataclass(frozen=True)
class Checked:
    """A check that found nothing wrong."""

    compared: str
    """What was compared; empty if nothing was."""
    decided: bool = True
    """Whether differences of the loss could show that a gradient is wrong."""


Check: TypeAlias = "Callable[[MicroBatch], Checked | None]"
"""None: the micro-batch has no finite gradient."""


def check_now(key: str, samples: Iterable[MicroBatch], rows: int, check: Check, report: Report) -> None:
    """`check` the first `rows` samples; if the graph does not take so few, all samples of the micro-batch."""
    start = time.perf_counter()
    for batch in islice(samples, 1):
        try:
            checked = check(cut(batch, rows))
        except RejectedBatch:
            if rows >= batch.count:
                raise
            # Samples that index others of their micro-batch need all of it.
            checked = check(batch)
        conclude(key, checked, time.perf_counter() - start, report)


def conclude(key: str, checked: Checked | None, seconds: float, report: Report) -> None:
    """Report a check that took so long, and record that it has passed. `checked`: None without a finite gradient."""
    if checked is None:
        report.warn("the gradient was not checked, because the first micro-batch has no finite gradient")
        return
    if not checked.decided:
        report.warn(
            "the gradient was not checked against differences of the loss, because the loss changes along it by no "
            "more than single precision rounds it, or has kinks at these parameters"
        )
    if checked.compared:
        report.record("gradient_check", seconds=round(seconds, 6), compared=checked.compared)
        report.note(f"gradient checked: {checked.compared}, {seconds:.1f} s")
    if checked.decided:
        remember(key)


def has_passed(key: str) -> bool:
    """Whether a passed check with this `key` is recorded."""
    return any((place / key).exists() for place in cache_folders("gradients"))


def cut(batch: MicroBatch, rows: int) -> MicroBatch:
    """At most `rows` samples: a micro-batch of evaluation may be too large to train on."""
    return MicroBatch({name: array[:rows] for name, array in batch.arrays.items()}, min(batch.count, rows))


def rows_of(index: FlatIndex, inputs: Iterable[BatchInput], micro_batch: int) -> int:
    """Samples to check the gradient of a whole model with: few, so that the check takes less memory than training does.

    Statistics over a batch of two do not represent those over a micro-batch, and a model with a fixed batch takes no
    other, so then the whole micro-batch is used.
    """
    has_statistics = any(entry.tensor.group == "state" for entry in index)
    is_fixed = any(batch_input.shape[0] is not None for batch_input in inputs)
    return micro_batch if has_statistics or is_fixed else min(2, micro_batch)


def remember(key: str) -> None:
    """Remember that a check of what `key` stands for has passed, if there is a folder for it."""
    for place in cache_folders("gradients"):
        with suppress(OSError):
            (place / key).touch()
            return
