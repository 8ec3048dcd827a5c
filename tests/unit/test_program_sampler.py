"""The sampler of `ortflow.program`: same samples in each step whatever the number of ranks, none lost or repeated."""

from __future__ import annotations

import random
import sys
from collections import Counter

import numpy as np
import pytest

from ortflow.program import ProgramError, Sampler
from ortflow.program import order as orders
from ortflow.workflow.data.order import SampleOrder


def samplers(count: int, batch: int, ranks: int, **more: object) -> list[Sampler]:
    return [Sampler(count, batch=batch, rank=r, world_size=ranks, **more) for r in range(ranks)]  # type: ignore[arg-type]


def steps(parts: list[Sampler], start: int, stop: int) -> list[list[int]]:
    """The samples of each step over all ranks, by iterating as a loop does."""
    for part in parts:
        part.seek(start)
    result: list[list[int]] = []
    while len(result) < stop - start:
        result += [[sample for own in samples for sample in own] for samples in zip(*parts, strict=True)]
    return result[: stop - start]


@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize(("count", "batch"), [(96, 12), (97, 12), (5, 12), (1, 12), (1000, 12)])
def test_other_numbers_of_ranks_see_the_same_samples_in_each_step(count: int, batch: int, lengths: bool) -> None:
    of = [random.Random(i).randint(1, 99) for i in range(count)] if lengths else None
    alone = steps(samplers(count, batch, 1, seed=3, lengths=of), 0, 50)
    for ranks in (2, 3, 4, 6, 12):
        assert [sorted(s) for s in steps(samplers(count, batch, ranks, seed=3, lengths=of), 0, 50)] == [
            sorted(s) for s in alone
        ]


def test_ranks_change_in_the_middle_of_an_epoch() -> None:
    count, batch = 1003, 24
    whole = steps(samplers(count, batch, 2, seed=1), 0, 200)
    parts = [(0, 17, 4), (17, 60, 1), (60, 61, 3), (61, 200, 2)]
    changed = [
        step for start, stop, ranks in parts for step in steps(samplers(count, batch, ranks, seed=1), start, stop)
    ]
    assert [sorted(step) for step in changed] == [sorted(step) for step in whole]


@pytest.mark.parametrize("lengths", [False, True])
def test_every_epoch_has_every_sample_once_and_its_own_order(lengths: bool) -> None:
    count, batch = 1003, 24
    of = [random.Random(i).randint(1, 99) for i in range(count)] if lengths else None
    sequence = [
        sample for step in steps(samplers(count, batch, 2, lengths=of), 0, 3 * count // batch) for sample in step
    ]
    seen = Counter(sequence)
    assert set(seen) == set(range(count))
    assert set(seen.values()) <= {2, 3}  # the third epoch is not complete
    single = [
        sample for step in range(3 * count // batch) for sample in Sampler(count, batch=batch, lengths=of).step(step)
    ]
    epochs = [single[epoch * count : (epoch + 1) * count] for epoch in range(2)]
    assert all(sorted(epoch) == list(range(count)) for epoch in epochs)
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("count", [2, 3, 7, 64, 65, 1000, 65537])
@pytest.mark.parametrize("with_numpy", [True, False])
def test_the_order_is_that_of_an_onnx_run(count: int, with_numpy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not with_numpy:
        monkeypatch.setitem(sys.modules, "numpy", None)
    stop = min(count, 3000)
    for epoch in range(2):
        expected = SampleOrder(count, seed=7).indices(epoch, 1, stop).tolist()
        assert orders.Order(count, 7).samples(epoch, 1, stop) == expected
        lengths = np.random.default_rng(count).integers(1, 50, count)
        expected = SampleOrder(count, seed=7, costs=lengths).indices(epoch, 1, stop).tolist()
        assert orders.Order(count, 7, lengths.tolist()).samples(epoch, 1, stop) == expected


def test_lengths_are_balanced_among_ranks_and_alike_within_a_step() -> None:
    lengths = [int(random.Random(i).lognormvariate(4, 1)) + 1 for i in range(20_000)]
    parts, plain = samplers(20_000, 64, 4, lengths=lengths), samplers(20_000, 64, 4)

    def spread(of: list[Sampler]) -> float:
        """The longest rank's share over the mean, averaged over the steps of two epochs."""
        ratios = []
        for _ in range(2):
            for step in zip(*of, strict=True):
                sums = [sum(lengths[sample] for sample in own) for own in step]
                ratios.append(max(sums) / (sum(sums) / len(sums)))
        return sum(ratios) / len(ratios)

    assert spread(plain) > 1.2
    assert spread(parts) < 1.02


def test_a_state_goes_to_the_same_data_alone() -> None:
    sampler = Sampler(100, batch=10, seed=1)
    iterator = iter(sampler)
    next(iterator)
    other = Sampler(100, batch=10, seed=1)
    sampler.seek(4)
    other.load_state_dict(sampler.state_dict())
    assert list(other) == list(sampler)
    for wrong in (Sampler(99, batch=10, seed=1), Sampler(100, batch=20, seed=1), Sampler(100, batch=10, seed=2),
                  Sampler(100, batch=10, seed=1, lengths=range(100))):  # fmt: skip
        with pytest.raises(ProgramError, match="Sampler has"):
            wrong.load_state_dict(sampler.state_dict())


def test_numbers_that_do_not_fit_are_refused() -> None:
    for message, arguments in (
        ("batch=10 is not divisible by 4 ranks", {"data": 100, "batch": 10, "world_size": 4, "rank": 0}),
        ("0 samples", {"data": [], "batch": 10}),
        ("batch=0", {"data": 100, "batch": 0}),
        ("3 lengths for 4 samples", {"data": 4, "batch": 1, "lengths": [1, 2, 3]}),
    ):
        with pytest.raises(ProgramError, match=message):
            Sampler(**arguments)  # type: ignore[arg-type]


def test_its_length_is_that_of_the_next_iteration() -> None:
    sampler = Sampler(103, batch=10)
    for _ in range(12):
        expected = len(sampler)
        assert len(list(sampler)) == expected
