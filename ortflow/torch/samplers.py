"""Samplers that give every rank samples of similar length at the same time.

In place of `onnxruntime.training.utils.data`; see docs/ortmodule.md. `ortflow.program.Sampler` does the same for runs
whose number of ranks changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from ortflow.workflow.errors import UserError


class LoadBalancingDistributedSampler(Sampler[int]):  # type: ignore[misc, unused-ignore]
    """Indices of this rank's samples, ordered so that all ranks have samples of similar complexity at the same time.

    The samples are sorted by complexity, within groups of `group_size` if given, and taken in rows of one sample for
    each rank. The order of the rows, or of the groups, is shuffled in every epoch. The last row is filled from the
    first samples.

    Parameters
    ----------
    dataset
        A map-style data set.
    complexity_fn
        Sample -> its complexity, such as its length. It is called once for each sample, at the first iteration.
    world_size, rank
        Number of ranks, and this one; by default those of `torch.distributed`.
    shuffle
        Whether to shuffle.
    group_size
        Samples of a group.
    seed
        Selects the orders, with the epoch; the same on all ranks.
    drop_last
        Leave out the last samples in place of filling the last row.
    random_level
        From 0, the best balance, to 1: how much of the range of complexities is added at random before sorting.

    Raises
    ------
    UserError
        For a value outside its range, and without `world_size` and `rank` before `init_process_group`.
    """

    def __init__(
        self,
        dataset: Any,
        complexity_fn: Callable[[Any], float],
        world_size: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        group_size: int | None = None,
        seed: int = 0,
        drop_last: bool = False,
        random_level: float = 0,
    ) -> None:
        class_name = "LoadBalancingDistributedSampler"
        if (world_size is None or rank is None) and not (dist.is_available() and dist.is_initialized()):
            fix = "call torch.distributed.init_process_group first, or give world_size and rank"
            raise UserError("the number of ranks is not known", where=class_name, fix=fix)
        self.world_size = dist.get_world_size() if world_size is None else world_size
        self.rank = dist.get_rank() if rank is None else rank
        if not 0 <= self.rank < self.world_size:
            raise UserError(f"rank is {self.rank}", where=class_name, fix=f"use 0 to {self.world_size - 1}")
        if not 0 <= random_level <= 1:
            raise UserError(f"random_level is {random_level}", where=class_name, fix="use 0 to 1")
        if group_size is not None and group_size < 1:
            raise UserError(f"group_size is {group_size}", where=class_name, fix="use at least 1")
        if not len(dataset):
            raise UserError("the data set is empty", where=class_name)
        self.dataset, self.complexity_fn = dataset, complexity_fn
        self.shuffle, self.group_size, self.seed, self.drop_last = shuffle, group_size, seed, drop_last
        self.random_level, self.epoch = random_level, 0
        samples_per_rank, rest = divmod(len(dataset), self.world_size)
        self.num_samples = samples_per_rank if drop_last or not rest else samples_per_rank + 1
        self._complexities: torch.Tensor | None = None

    def set_epoch(self, epoch: int) -> None:
        """Select the order of an epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Return the number of this rank's samples."""
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        """Yield the indices of this rank's samples in this epoch."""
        return iter(self.indices(self.rank))

    def indices(self, rank: int) -> list[int]:
        """The indices of a rank's samples in this epoch."""
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = self._groups(self._sorted(generator), generator)
        rows = [order[first : first + self.world_size] for first in range(0, len(order), self.world_size)]
        if len(rows[-1]) < self.world_size:
            if self.drop_last:
                rows.pop()
            else:
                # With fewer samples than ranks, some are repeated several times.
                missing = self.world_size - len(rows[-1])
                rows[-1] = rows[-1] + (order * math.ceil(missing / len(order)))[:missing]
        if self.shuffle and self.group_size is None:
            rows = [rows[place] for place in torch.randperm(len(rows), generator=generator).tolist()]
        return [row[rank] for row in rows]

    def _sorted(self, generator: torch.Generator) -> list[list[int]]:
        """The indices of each group, by complexity."""
        if self._complexities is None:
            # Once: a function of the user's samples may be slow.
            complexities = [float(self.complexity_fn(self.dataset[place])) for place in range(len(self.dataset))]
            self._complexities = torch.tensor(complexities, dtype=torch.float64)
        values = self._complexities
        spread = float(values.max() - values.min()) * self.random_level
        if spread:
            values = values + spread * torch.rand(len(values), generator=generator, dtype=torch.float64)
        size = self.group_size or len(values)
        return [
            (torch.argsort(part, stable=True) + first).tolist()
            for first, part in zip(range(0, len(values), size), values.split(size), strict=True)
        ]

    def _groups(self, groups: Sequence[list[int]], generator: torch.Generator) -> list[int]:
        places: Sequence[int] = range(len(groups))
        if self.shuffle and self.group_size is not None:
            places = torch.randperm(len(groups), generator=generator).tolist()
        return [index for place in places for index in groups[place]]


class LoadBalancingDistributedBatchSampler(Sampler[list[int]]):  # type: ignore[misc, unused-ignore]
    """Batches of a `LoadBalancingDistributedSampler`'s samples, of any sizes, as many on every rank.

    Parameters
    ----------
    sampler
        The sampler, without `drop_last`.
    batch_fn
        The indices of a rank's samples -> its batches, lists of indices. It must return the same on every rank for the
        same indices.
    drop_last
        Leave out the batches that not every rank has. Otherwise a rank with fewer repeats its first ones.

    Raises
    ------
    UserError
        For another sampler, one with `drop_last`, and a `batch_fn` that returns no batches.
    """

    def __init__(
        self,
        sampler: Any,
        batch_fn: Callable[[list[int]], Sequence[list[int]]],
        drop_last: bool = False,
    ) -> None:
        class_name = "LoadBalancingDistributedBatchSampler"
        if not isinstance(sampler, LoadBalancingDistributedSampler):
            fix = "pass a LoadBalancingDistributedSampler"
            raise UserError(f"its sampler is a {type(sampler).__name__}", where=class_name, fix=fix)
        if sampler.drop_last:
            raise UserError(
                "its sampler has drop_last", where=class_name, fix="set drop_last of the batch sampler instead"
            )
        self.sampler, self.batch_fn, self.drop_last = sampler, batch_fn, drop_last
        self._batches: list[list[int]] = []
        self._key: tuple[int, ...] | None = None

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.sampler.world_size

    @property
    def rank(self) -> int:
        """This rank."""
        return self.sampler.rank

    def set_epoch(self, epoch: int) -> None:
        """Select the order of an epoch."""
        self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        """Return the number of batches of this epoch."""
        return len(self._of_epoch())

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's batches of this epoch."""
        return iter(list(self._of_epoch()))

    def _of_epoch(self) -> list[list[int]]:
        key = (self.sampler.epoch, self.sampler.seed)
        if key != self._key:
            everyone = [self._of(rank) for rank in range(self.world_size)]
            lengths = [len(batches) for batches in everyone]
            count = min(lengths) if self.drop_last else max(lengths)
            own_batches = everyone[self.rank]
            self._batches = (own_batches * math.ceil(count / len(own_batches)))[:count]
            self._key = key
        return self._batches

    def _of(self, rank: int) -> list[list[int]]:
        batches = self.batch_fn(self.sampler.indices(rank))
        try:
            listed = [[int(index) for index in batch] for batch in batches]
        except (TypeError, ValueError):
            problem = f"batch_fn returned a {type(batches).__name__}"
            raise UserError(problem, where=type(self).__name__, fix="return a list of lists of indices") from None
        if not listed:
            raise UserError("batch_fn returned no batches", where=type(self).__name__, fix="return at least one")
        return listed
