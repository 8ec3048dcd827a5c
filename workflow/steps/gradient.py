"""The check of the gradient before the first step: rank 0 does it, all ranks hear of a fault.

Called by step `shard`, which has a real micro-batch. What has passed is remembered by its hash, in a cache folder of
the user's, for every run of the same graphs, kernels and runtime.
"""

from __future__ import annotations

import time
from contextlib import suppress
from itertools import islice
from pathlib import Path

from ortflow.workflow.errors import OrtflowError
from ortflow.workflow.kernels.library import cache_folders
from ortflow.workflow.steps.context import Context
from ortflow.workflow.trainer import MicroBatch


def check_gradient(context: Context) -> None:
    """Raises UserError on every rank where the gradient is wrong."""
    if not context.spec.train.check_gradient:
        return
    trouble: OrtflowError | None = None
    if context.leads:
        try:
            _check(context)
        except OrtflowError as error:
            trouble = error
    trouble = context.world.share(trouble)
    if trouble is not None:
        raise trouble
    context.leave_if_asked()


def _check(context: Context) -> None:
    key = context.trainer.gradient_key()
    places = list(cache_folders("gradients"))
    if any((place / key).exists() for place in places):
        return
    start = time.perf_counter()
    for batch in islice(context.stream.samples(), 1):
        compared = context.trainer.check_gradient(_cut(batch, _rows(context)), context.spec.seed)
        if compared is None:
            context.monitor.warn("the gradient was not checked, because the first micro-batch has no finite gradient")
            return
        seconds = time.perf_counter() - start
        context.events.write("gradient_check", seconds=round(seconds, 6), compared=compared)
        print(f"gradient checked: {compared}, {seconds:.1f} s", flush=True)
        _remember(places, key)


def _rows(context: Context) -> int:
    """Samples to check with: few, so that the check takes less memory than training does.

    Statistics over a batch of two are no model of those over a micro-batch, so where there are any it is a whole one.
    """
    has_statistics = any(entry.tensor.group == "state" for entry in context.trainer.index)
    return context.plan.micro_batch if has_statistics else min(2, context.plan.micro_batch)


def _cut(batch: MicroBatch, rows: int) -> MicroBatch:
    """At most `rows` samples: a micro-batch of evaluation may be too large to train on."""
    return MicroBatch({name: array[:rows] for name, array in batch.arrays.items()}, min(batch.count, rows))


def _remember(places: list[Path], key: str) -> None:
    for place in places:
        with suppress(OSError):
            (place / key).touch()
            return
