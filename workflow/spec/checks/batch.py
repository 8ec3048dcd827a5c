"""Whether the samples of a step divide over the replicas and their micro-batches, and what would fit. Pure.

Used by the check of a run file, and by a launcher before a run goes on with another number of ranks.
"""

from __future__ import annotations

from ortflow.workflow.errors import UserError
from ortflow.workflow.parallel.grid import Grid

KEY = "train.global_batch"
REACH = 4096
"""Number of candidates to try for a size that divides: a run file may contain any integer."""


def undivided(batch: int, micro_batch: int, grid: Grid) -> UserError | None:
    """Why a global batch of `batch` samples is not a whole number of micro-batches per replica; None if it is."""
    together = micro_batch * grid.data
    if batch % together == 0:
        return None
    return UserError(
        f"is {batch} samples a step, which {replicas(grid)} x {micro_batch} samples (data.micro_batch) do not divide",
        where=KEY,
        fix=f"use {', or '.join(fitting(batch, micro_batch, grid))}",
    )


def replicas(grid: Grid) -> str:
    """The ranks, or replicas of several ranks, that divide the samples of a step, as text."""
    ranks_per_replica = grid.pipeline * grid.horizontal
    if ranks_per_replica == 1:
        return _ranks(grid.data)
    return f"{grid.data} replica{'' if grid.data == 1 else 's'} of {ranks_per_replica} ranks"


def fitting(batch: int, micro_batch: int, grid: Grid) -> list[str]:
    """Alternatives that divide: a smaller micro-batch, the nearest numbers of ranks, the nearest batches."""
    alternatives, copies, ranks_per_replica = [], grid.data, grid.pipeline * grid.horizontal
    if batch % copies == 0:
        share = batch // copies
        alternatives += [f"data.micro_batch={size}" for size in _first(share, min(micro_batch, share), up=False)]
    if batch % micro_batch == 0:
        micro_batches = batch // micro_batch
        counts = [*_first(micro_batches, copies - 1, up=False), *_first(micro_batches, copies + 1, up=True)]
        alternatives += [" or ".join(_ranks(count * ranks_per_replica) for count in counts)] if counts else []
    together = micro_batch * copies
    batches = [size for size in (batch // together * together, (batch // together + 1) * together) if size]
    return [*alternatives, "accept another batch with " + " or ".join(f"{KEY}={size}" for size in batches)]


def _first(number: int, start: int, *, up: bool) -> list[int]:
    """The first divisor of a number, from `start` up or down; none if there is none among the candidates."""
    reached = range(start, min(number, start + REACH) + 1) if up else range(start, max(0, start - REACH), -1)
    return [size for size in reached if number % size == 0][:1]


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"
