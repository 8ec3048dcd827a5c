"""Caches the check of the gradient before the first step.

Passed checks are recorded by hash in a cache folder of the user, for every run with the same graphs, kernels and
runtime.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import islice

from ortflow.workflow.kernels.library import cache_folders
from ortflow.workflow.layout import FlatIndex
from ortflow.workflow.trainer import MicroBatch, Report


def check_once(
    key: str, samples: Iterable[MicroBatch], rows: int, check: Callable[[MicroBatch], str | None], report: Report
) -> None:
    """`check` the first `rows` samples, unless a check with the same `key` has passed before.

    `check` returns what it compared, or None if the micro-batch has no finite gradient.
    """
    if not has_passed(key):
        check_now(key, samples, rows, check, report)


def check_now(
    key: str, samples: Iterable[MicroBatch], rows: int, check: Callable[[MicroBatch], str | None], report: Report
) -> None:
    """The same, whatever has passed before."""
    start = time.perf_counter()
    for batch in islice(samples, 1):
        compared = check(cut(batch, rows))
        if compared is None:
            report.warn("the gradient was not checked, because the first micro-batch has no finite gradient")
            return
        seconds = time.perf_counter() - start
        report.record("gradient_check", seconds=round(seconds, 6), compared=compared)
        report.note(f"gradient checked: {compared}, {seconds:.1f} s")
        remember(key)


def has_passed(key: str) -> bool:
    """Whether a passed check with this `key` is recorded."""
    return any((place / key).exists() for place in cache_folders("gradients"))


def cut(batch: MicroBatch, rows: int) -> MicroBatch:
    """At most `rows` samples: a micro-batch of evaluation may be too large to train on."""
    return MicroBatch({name: array[:rows] for name, array in batch.arrays.items()}, min(batch.count, rows))


def rows_of(index: FlatIndex, micro_batch: int) -> int:
    """Samples to check the gradient of a whole model with: few, so that the check takes less memory than training does.

    Statistics over a batch of two do not represent those over a micro-batch, so then the whole micro-batch is used.
    """
    has_statistics = any(entry.tensor.group == "state" for entry in index)
    return micro_batch if has_statistics else min(2, micro_batch)


def remember(key: str) -> None:
    """Remember that a check of what `key` stands for has passed, if there is a folder for it."""
    for place in cache_folders("gradients"):
        with suppress(OSError):
            (place / key).touch()
            return
