"""The load-balancing samplers: balance, coverage, epochs, and their use by a DataLoader."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from ortflow.torch.samplers import LoadBalancingDistributedBatchSampler, LoadBalancingDistributedSampler
from ortflow.workflow.errors import UserError


class Sentences(Dataset[torch.Tensor]):
    def __init__(self, count: int, seed: int = 0) -> None:
        self.lengths = np.random.default_rng(seed).integers(1, 200, count)
        self.reads = 0

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, place: int) -> torch.Tensor:
        self.reads += 1
        return torch.full((int(self.lengths[place]),), place)


def samplers(data: Sentences, ranks: int, **options: Any) -> list[LoadBalancingDistributedSampler]:
    return [LoadBalancingDistributedSampler(data, len, ranks, rank, **options) for rank in range(ranks)]


@pytest.mark.parametrize("seed", range(12))
def test_every_epoch_has_every_sample_and_is_balanced(seed: int) -> None:
    random = np.random.default_rng(seed)
    count, ranks = int(random.integers(1, 120)), int(random.integers(1, 5))
    size = int(random.integers(1, 40)) if seed % 2 else None
    data = Sentences(count, seed)
    parts = samplers(data, ranks, group_size=size, seed=seed)
    orders = []
    for epoch in range(3):
        for part in parts:
            part.set_epoch(epoch)
        lists = [list(part) for part in parts]
        assert {len(found) for found in lists} == {len(parts[0])} == {-(-count // ranks)}
        assert set(itertools.chain(*lists)) == set(range(count))
        assert lists == [list(part) for part in parts]
        orders.append(lists)
    # Ranks differ by less than in a sampler that does not know the lengths.
    if size is None and count >= 50 and ranks > 1:
        assert orders[0] != orders[1]
        gaps = [np.ptp(data.lengths[np.array(row)]) for row in zip(*orders[1], strict=True)]
        plain = [list(DistributedSampler(data, ranks, rank)) for rank in range(ranks)]  # type: ignore[arg-type]
        others = [np.ptp(data.lengths[np.array(row)]) for row in zip(*plain, strict=True)]
        assert np.mean(gaps) < 0.25 * np.mean(others)
    # The complexity of a sample is computed once on each rank.
    assert data.reads == count * ranks


def test_options() -> None:
    data = Sentences(11)
    assert [len(part) for part in samplers(data, 4, drop_last=True)] == [2] * 4
    assert len(set(itertools.chain(*samplers(data, 4, drop_last=True)))) == 8
    fixed = samplers(data, 1, shuffle=False)[0]
    assert list(fixed) == np.argsort(data.lengths, kind="stable").tolist()
    noisy = samplers(data, 1, shuffle=False, random_level=1.0)[0]
    assert sorted(noisy) == list(range(11))
    assert list(noisy) != list(fixed)


def batches(indices: list[int]) -> list[list[int]]:
    """At most 300 tokens of the longest sentence's length to a batch."""
    found: list[list[int]] = [[]]
    for index in indices:
        if len(found[-1]) >= 3 + index % 2:
            found.append([])
        found[-1].append(index)
    return found


@pytest.mark.parametrize("drop", [False, True])
def test_batches_of_three_epochs_by_a_loader(drop: bool) -> None:
    data = Sentences(101)
    parts = [LoadBalancingDistributedBatchSampler(part, batches, drop) for part in samplers(data, 2)]
    loaders = [DataLoader(data, batch_sampler=part, collate_fn=list) for part in parts]
    for epoch in range(3):
        for part in parts:
            part.set_epoch(epoch)
        counts = [len(loader) for loader in loaders]
        seen = [[[int(sample[0]) for sample in batch] for batch in loader] for loader in loaders]
        assert counts[0] == counts[1] == len(seen[0]) == len(seen[1])
        if not drop:
            assert {index for rank in seen for batch in rank for index in batch} == set(range(101))


def test_errors() -> None:
    data = Sentences(5)
    with pytest.raises(UserError, match=r"the number of ranks is not known; call torch\.distributed"):
        LoadBalancingDistributedSampler(data, len)
    with pytest.raises(UserError, match="rank is 2; use 0 to 1"):
        LoadBalancingDistributedSampler(data, len, 2, 2)
    with pytest.raises(UserError, match="random_level is 2"):
        LoadBalancingDistributedSampler(data, len, 2, 0, random_level=2)
    with pytest.raises(UserError, match="its sampler is a list"):
        LoadBalancingDistributedBatchSampler([], batches)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="its sampler has drop_last"):
        LoadBalancingDistributedBatchSampler(samplers(data, 1, drop_last=True)[0], batches)
    wrong = LoadBalancingDistributedBatchSampler(samplers(data, 1)[0], lambda indices: indices)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="return a list of lists of indices"):
        len(wrong)
