"""The order of the samples: a fixed permutation that depends only on seed and epoch."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortflow.workflow.data.order import SampleOrder, permute

GOLDEN_0 = [767, 46, 987, 133, 584, 590, 592, 650]
GOLDEN_1 = [451, 926, 818, 524, 295, 411, 351, 231]
GOLDEN_LARGE = [380460257289, 900388376691, 783456508215, 149606178536]
GOLDEN_COSTS = [490, 198, 4, 394, 972, 779, 878, 293]


def epoch(order: SampleOrder, number: int) -> list[int]:
    return [int(sample) for sample in order.indices(number, 0, order.count)]


@given(st.integers(1, 3000), st.integers(0, 2**70), st.integers(0, 10**6))
def test_every_sample_once_an_epoch(count: int, seed: int, number: int) -> None:
    assert sorted(epoch(SampleOrder(count, seed), number)) == list(range(count))


def test_the_order_never_changes() -> None:
    """Checkpoints store a run's place in an epoch: if these numbers change, saved runs cannot resume correctly."""
    order = SampleOrder(1000, seed=42)
    assert order.indices(0, 0, 8).tolist() == GOLDEN_0
    assert order.indices(1, 0, 8).tolist() == GOLDEN_1
    assert SampleOrder(10**12, seed=7).indices(3, 10**11, 10**11 + 4).tolist() == GOLDEN_LARGE
    costs = np.arange(1000)[::-1] % 97
    assert SampleOrder(1000, 42, costs=costs, bucket=64).indices(0, 0, 8).tolist() == GOLDEN_COSTS


def test_seeds_and_epochs_give_other_orders() -> None:
    orders = [epoch(SampleOrder(200, seed), number) for seed in range(4) for number in range(4)]
    assert all(one != other for one, other in itertools.combinations(orders, 2))


def test_the_order_within_a_bucket_is_another_one_in_each_epoch_and_bucket() -> None:
    order = SampleOrder(64, 5, costs=np.arange(64), bucket=16)
    orders = []
    for number in range(4):
        samples = np.array(epoch(order, number))
        orders += [tuple(samples[samples // 16 == bucket] % 16) for bucket in range(4)]
    assert len(set(orders)) == len(orders)


@given(st.data())
def test_a_part_of_an_epoch_is_that_part(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 40_000))
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    costs = np.arange(count) % 13 if data.draw(st.booleans()) else None
    order = SampleOrder(count, 5, costs=costs)
    whole = SampleOrder(count, 5, costs=costs).indices(2, 0, count)
    order.indices(1, 0, min(10, count))
    assert np.array_equal(order.indices(2, start, stop), whole[start:stop])


def test_places_beyond_the_epoch_are_refused() -> None:
    with pytest.raises(IndexError):
        SampleOrder(10, 0).indices(0, 5, 11)


@pytest.mark.parametrize("count", [2, 3, 5, 10])
def test_every_sample_comes_first_about_as_often(count: int) -> None:
    epochs = 1000
    firsts = np.bincount([SampleOrder(count, 1).indices(e, 0, 1)[0] for e in range(epochs)], minlength=count)
    expected = epochs / count
    chi_square = float(((firsts - expected) ** 2 / expected).sum())
    assert chi_square < 4 * count + 12, firsts


def test_neighbours_are_torn_apart() -> None:
    order = SampleOrder(100_000, 3).indices(0, 0, 100_000)
    assert int((np.abs(np.diff(order)) == 1).sum()) < 15
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02


def test_no_shuffle_is_the_stored_order() -> None:
    assert epoch(SampleOrder(50, 1, shuffle=False), 3) == list(range(50))


def test_a_permutation_of_its_own_for_each_place() -> None:
    keys = np.arange(1000, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    first = permute(np.zeros(1000, dtype=np.int64), 10, keys)
    assert set(first.tolist()) == set(range(10))


def test_sorted_by_cost_without_shuffle() -> None:
    costs = np.array([3, 1, 2, 1, 3, 1])
    assert epoch(SampleOrder(6, 0, shuffle=False, costs=costs), 0) == [1, 3, 5, 2, 0, 4]


@given(st.integers(1, 2000), st.integers(1, 300), st.integers(0, 100))
def test_by_cost_every_sample_once(count: int, bucket: int, seed: int) -> None:
    costs = np.random.default_rng(seed).integers(0, 50, count)
    assert sorted(epoch(SampleOrder(count, seed, costs=costs, bucket=bucket), 1)) == list(range(count))


def test_a_bucket_holds_neighbours_by_cost_in_another_order_each_epoch() -> None:
    costs = np.random.default_rng(0).integers(1, 10_000, 1030)
    order = SampleOrder(1030, 9, costs=costs, bucket=100)
    ranks = np.argsort(np.argsort(costs, kind="stable"), kind="stable")
    seen = []
    for number in range(4):
        buckets = [key for key, _ in itertools.groupby((ranks[epoch(order, number)] // 100).tolist())]
        assert sorted(buckets) == list(range(11))
        seen.append(buckets)
        inside = ranks[epoch(order, number)]
        assert not np.array_equal(inside[inside < 100], np.arange(100))
    assert len(set(map(tuple, seen))) == 4
