"""The batches of a rank: an endless sequence for training, one pass over the set for evaluation.

Used by the training loop and the evaluation. The only state between steps is the position, which each batch contains:
training can continue from the position of the last completed step with any number of ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from typing_extensions import assert_never

from ortflow.workflow.data.ahead import ReadAhead
from ortflow.workflow.data.epoch_positions import LastBatch, Plan, Position, Step
from ortflow.workflow.data.feed import Feed, collate
from ortflow.workflow.data.inputs import MicroBatch
from ortflow.workflow.data.order import Indices, SampleOrder
from ortflow.workflow.data.samples import Epochs, Samples
from ortflow.workflow.data.schema import Array
from ortflow.workflow.errors import UserError
from ortflow.workflow.spec.data import DataSection

_AHEAD = 2
"""Groups of steps read in advance."""
_GROUP_BYTES = 1 << 20
_GROUP_STEPS = 16
"""Small steps are read in groups of about a megabyte: below that, numpy's calls cost more than the bytes."""


@dataclass(frozen=True)
class StepBatch:
    """The samples of a rank in one step: `accumulation` micro-batches, some of them with fewer or no real samples."""

    micro_batches: Sequence[MicroBatch]
    epoch: int
    """Epoch of these samples, from 0."""
    samples: int
    """Real samples over all ranks."""
    next: Position
    """Position after this step."""
    epoch_end: bool
    """Whether the next step begins another epoch."""


class Batches:
    """A rank's part of every global batch, from any position on."""

    def __init__(
        self,
        dataset: Samples,
        order: SampleOrder,
        feeds: Sequence[Feed],
        *,
        micro_batch: int,
        accumulation: int,
        rank: int,
        world_size: int,
        last_batch: LastBatch,
    ) -> None:
        """Raises UserError if the set is smaller than a global batch and `last_batch` drops it."""
        self.plan = Plan(len(dataset), micro_batch, accumulation, world_size, last_batch)
        if self.plan.steps_per_epoch == 0:
            raise UserError(
                f"has {len(dataset)} samples, fewer than the {self.plan.global_batch} of one step "
                f"({micro_batch} x {accumulation} micro-steps x {world_size} ranks)",
                where=str(dataset.path),
                fix="lower data.micro_batch, or set data.last_batch to keep or pad",
            )
        self._dataset, self._order, self._feeds, self._rank = dataset, order, tuple(feeds), rank
        self._epochs = dataset if isinstance(dataset, Epochs) else None

    def read_from(self, position: Position) -> ReadAhead[StepBatch]:
        """All steps from a position on, without end, read ahead in the background; close it, or use it in a `with`
        block.
        """
        step_bytes = _bytes_per_sample(self._dataset, self._feeds) * self.plan.micro_batch * self.plan.accumulation
        return ReadAhead(self._groups(position, min(_GROUP_STEPS, max(1, _GROUP_BYTES // step_bytes))), _AHEAD)

    def _groups(self, position: Position, size: int) -> Iterator[list[StepBatch]]:
        while True:
            steps = []
            for _ in range(size):
                steps.append(self.plan.step(position))
                position = steps[-1].next
            yield self._read(steps)

    def _read(self, steps: Sequence[Step]) -> list[StepBatch]:
        accumulation = self.plan.accumulation
        selections = [self._indices(step, number) for step in steps for number in range(accumulation)]
        collated = self._collate(steps, [indices for indices, _ in selections])
        rank_batches = [MicroBatch(arrays, count) for arrays, (_, count) in zip(collated, selections, strict=True)]
        return [
            StepBatch(
                rank_batches[number * accumulation : (number + 1) * accumulation],
                step.epoch,
                step.stop - step.start,
                step.next,
                step.epoch_end,
            )
            for number, step in enumerate(steps)
        ]

    def _collate(self, steps: Sequence[Step], batches: list[Indices]) -> list[dict[str, Array]]:
        if self._epochs is None:
            return collate(self._dataset, self._feeds, batches)
        collated: list[dict[str, Array]] = []
        for epoch, epoch_steps in itertools.groupby(steps, lambda step: step.epoch):
            count = len(list(epoch_steps)) * self.plan.accumulation
            part = batches[len(collated) : len(collated) + count]
            collated += collate(self._epochs.at(epoch), self._feeds, part)
        return collated

    def _indices(self, step: Step, number: int) -> tuple[Indices, int]:
        """The samples of a micro-step, and the number of real ones."""
        first, last = self.plan.places(step, number, self._rank)
        indices = self._order.indices(step.epoch, first, last)
        if self.plan.last_batch == "pad":
            indices = _filled_up(indices, self.plan.micro_batch)
        return indices, last - first


def evaluation_batches(
    dataset: Samples,
    feeds: Sequence[Feed],
    *,
    micro_batch: int,
    rank: int,
    world_size: int,
    mode: Literal["partitioned", "replicated"] = "partitioned",
    last_batch: LastBatch = "keep",
    samples: int | None = None,
) -> ReadAhead[MicroBatch]:
    """A rank's micro-batches for one evaluation, in the stored order.

    Parameters
    ----------
    dataset, feeds
        The set, and how each input is filled from it.
    micro_batch
        Samples per micro-batch. The last one is smaller or, with `last_batch` pad, padded; none is dropped.
    rank, world_size
        The rank, and the number of ranks.
    mode
        Partitioned: micro-batch k goes to rank k % world_size; replicated: each rank gets all.
    last_batch
        `data.last_batch` of the run file.
    samples
        Evaluate only the first so many samples; all if None.
    """
    count = len(dataset) if samples is None else min(samples, len(dataset))
    if mode == "partitioned":
        first, stride = rank, world_size
    elif mode == "replicated":
        first, stride = 0, 1
    else:
        assert_never(mode)

    def read() -> Iterator[list[MicroBatch]]:
        for start in range(first * micro_batch, count, stride * micro_batch):
            indices = np.arange(start, min(start + micro_batch, count))
            rows = _filled_up(indices, micro_batch) if last_batch == "pad" else indices
            yield [MicroBatch(arrays, len(indices)) for arrays in collate(dataset, feeds, [rows])]

    return ReadAhead(read(), _AHEAD)


def sample_order(dataset: Samples, section: DataSection, seed: int) -> SampleOrder:
    """The training order for the run file's `data` section.

    Raises UserError if `by_length` does not name a column whose length or value can be a cost.
    """
    by_length = section.by_length
    if by_length is None:
        return SampleOrder(len(dataset), seed, section.shuffle)
    key_path = "data.by_length.column"
    column = dataset.columns.get(by_length.column)
    if column is None:
        names = ", ".join(dataset.columns)
        raise UserError(f"{dataset.path} has no column {by_length.column!r}", where=key_path, fix=f"choose of: {names}")
    if column.variable:
        costs = dataset.lengths(by_length.column)
    elif column.shape == () and column.dtype.kind in "iu":
        costs = np.concatenate([values for _, values in dataset.scan(by_length.column)])
    else:
        raise UserError(
            f"column {by_length.column!r} is {column}, neither of variable length nor one integer per sample",
            where=key_path,
            fix="name a column that gives the length of a sample",
        )
    return SampleOrder(len(dataset), seed, section.shuffle, costs, by_length.bucket)


def _filled_up(indices: Indices, count: int) -> Indices:
    """Repeat the samples up to `count`; if there are none, take the set's first.

    Padding samples have weight 0. Real values are as safe as zeros, and keep averages over the batch realistic.
    """
    if len(indices) == 0:
        return np.zeros(count, dtype=np.int64)
    # The function repeats the array; the method of the same name would append zeros.
    return np.resize(indices, count)


def _bytes_per_sample(dataset: Samples, feeds: Sequence[Feed]) -> int:
    """Bytes of one sample in a micro-batch; an estimate if its length varies."""
    total = 0
    for feed in feeds:
        column = dataset.columns[feed.source.column]
        shape = itertools.chain([1024 if column.variable else 1], column.shape)
        total += int(np.prod(list(shape))) * feed.dtype.itemsize
    return total
