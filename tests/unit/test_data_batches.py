"""Batches: nothing is lost or repeated, for any number of ranks, wherever a run resumes."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_sets import feed, numbered, ragged, write_batches
from hypothesis import given, settings
from hypothesis import strategies as st
from waits import PATIENCE, wait_until

from ortflow.workflow.data.ahead import ReadAhead
from ortflow.workflow.data.batches import Batches, StepBatch, evaluation_batches, sample_order
from ortflow.workflow.data.dataset import Dataset
from ortflow.workflow.data.epoch_positions import LastBatch, Plan, Position
from ortflow.workflow.data.order import SampleOrder
from ortflow.workflow.errors import UserError
from ortflow.workflow.spec.data import ByLength, DataSection, DataSet

NUMBER = (feed("number", "number"),)
START = Position()


def reader(
    dataset: Dataset, position: Position = START, rank: int = 0, world_size: int = 1, **changed: Any
) -> ReadAhead[StepBatch]:
    options: dict[str, Any] = {"micro_batch": 2, "accumulation": 1, "last_batch": "drop"} | changed
    order = options.pop("order", None) or SampleOrder(len(dataset), seed=11)
    feeds = options.pop("feeds", NUMBER)
    return Batches(dataset, order, feeds, rank=rank, world_size=world_size, **options).read_from(position)


def real_samples(step: StepBatch) -> list[int]:
    return [n for batch in step.micro_batches for n in batch.arrays["number"][: batch.count].tolist()]


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Dataset]:
    folder = tmp_path_factory.mktemp("sets")
    return {count: numbered(folder / f"{count}.arrow", count) for count in range(1, 60)}


def ranks_take(shape: dict[str, int], world_size: int) -> int:
    return shape["micro_batch"] * shape["accumulation"] * world_size


LAST_BATCH: tuple[LastBatch, ...] = ("drop", "keep", "pad")
LAST = st.sampled_from(LAST_BATCH)


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_resuming_with_other_ranks_loses_and_repeats_nothing(data: st.DataObject, sets: dict[int, Dataset]) -> None:
    """Two epochs in attempts of any world size, accumulation and micro-batch: each sample exactly once an epoch."""
    count, last_batch = data.draw(st.integers(1, 59)), data.draw(LAST)
    position = Position()
    seen: dict[int, list[int]] = {0: [], 1: []}
    dropped: dict[int, int] = {}
    while position.epoch < 2:
        shape = {"micro_batch": data.draw(st.integers(1, 7)), "accumulation": data.draw(st.integers(1, 3))}
        world_size = data.draw(st.integers(1, 5))
        if Plan(count, world_size=world_size, last_batch=last_batch, **shape).steps_per_epoch == 0:
            shape, world_size = {"micro_batch": 1, "accumulation": 1}, 1
        ranks = [
            reader(sets[count], position, rank, world_size, last_batch=last_batch, **shape)
            for rank in range(world_size)
        ]
        for _ in range(data.draw(st.integers(1, 6))):
            steps = [next(rank) for rank in ranks]
            assert len({(step.epoch, step.next, step.samples, step.epoch_end) for step in steps}) == 1
            taken = [number for step in steps for number in real_samples(step)]
            assert len(taken) == steps[0].samples > 0
            assert last_batch != "drop" or len(taken) == ranks_take(shape, world_size)
            epoch = steps[0].epoch
            if position.epoch < epoch:
                dropped[position.epoch] = count - position.sample
                assert dropped[position.epoch] < ranks_take(shape, world_size)
                position = Position(epoch, 0)
            if epoch < 2:
                seen[epoch] += taken
            if steps[0].epoch_end:
                dropped[epoch] = count - position.sample - len(taken)
                assert dropped[epoch] < ranks_take(shape, world_size)
            position = steps[0].next
        for rank in ranks:
            rank.close()
    for epoch in (0, 1):
        assert len(seen[epoch]) == len(set(seen[epoch])) == count - dropped[epoch]
        assert last_batch == "drop" or dropped[epoch] == 0
        order = SampleOrder(count, seed=11).indices(epoch, 0, count - dropped[epoch])
        assert sorted(order.tolist()) == sorted(seen[epoch])


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_global_batch_does_not_depend_on_how_it_is_divided(world_size: int, sets: dict[int, Dataset]) -> None:
    micro_batch = 12 // world_size
    ranks = [reader(sets[50], Position(), rank, world_size, micro_batch=micro_batch) for rank in range(world_size)]
    expected = SampleOrder(50, seed=11).indices(0, 0, 12).tolist()
    assert [number for rank in ranks for number in real_samples(next(rank))] == expected


def test_micro_steps_and_ranks_take_consecutive_places(sets: dict[int, Dataset]) -> None:
    order = SampleOrder(50, 0, shuffle=False)
    steps = [next(reader(sets[50], Position(0, 5), rank, 2, accumulation=3, order=order)) for rank in (0, 1)]
    batches = [[batch.arrays["number"].tolist() for batch in step.micro_batches] for step in steps]
    assert batches == [[[5, 6], [9, 10], [13, 14]], [[7, 8], [11, 12], [15, 16]]]
    assert steps[0].next == Position(0, 17)


@pytest.mark.parametrize(
    ("last_batch", "shapes", "counts"),
    [("keep", [[(2,), (2,)], [(1,), (0,)]], [[2, 2], [1, 0]]), ("pad", [[(2,), (2,)], [(2,), (2,)]], [[2, 2], [1, 0]])],
)
def test_the_rest_of_an_epoch(last_batch: LastBatch, shapes: object, counts: object, sets: dict[int, Dataset]) -> None:
    ranks = [reader(sets[5], Position(), rank, 2, last_batch=last_batch) for rank in (0, 1)]
    steps = [[next(rank) for rank in ranks] for _ in range(2)]
    assert [[rank.micro_batches[0].arrays["number"].shape for rank in step] for step in steps] == shapes
    assert [[rank.micro_batches[0].count for rank in step] for step in steps] == counts
    assert [step[0].samples for step in steps] == [4, 1]
    assert [step[0].epoch_end for step in steps] == [False, True]


def test_steps_per_epoch() -> None:
    assert [Plan(10, 2, 1, 2, last).steps_per_epoch for last in LAST_BATCH] == [2, 3, 3]


def test_a_set_smaller_than_a_step_is_refused(sets: dict[int, Dataset]) -> None:
    with pytest.raises(UserError, match=r"5 samples.*8"):
        reader(sets[5], world_size=2, accumulation=2)
    assert next(reader(sets[5], world_size=2, accumulation=2, last_batch="keep")).samples == 5


def test_slices_widen_tokens(tmp_path: Path) -> None:
    tokens = np.arange(40, dtype=np.uint8).reshape(4, 10)
    dataset = write_batches(tmp_path / "set.arrow", {"tokens": tokens})
    feeds = [feed("input_ids", "tokens[:-1]"), feed("labels", "tokens[1:]"), feed("mask", "tokens[2:4]", "uint8")]
    arrays = next(reader(dataset, order=SampleOrder(4, 0, shuffle=False), feeds=feeds)).micro_batches[0].arrays
    assert np.array_equal(arrays["input_ids"], tokens[:2, :-1])
    assert np.array_equal(arrays["labels"], tokens[:2, 1:])
    assert np.array_equal(arrays["mask"], tokens[:2, 2:4])
    assert [array.dtype.name for array in arrays.values()] == ["int64", "int64", "uint8"]
    assert all(array.flags.c_contiguous for array in arrays.values())


def test_variable_samples_are_padded_to_the_longest_of_the_micro_batch(tmp_path: Path) -> None:
    dataset = write_batches(tmp_path / "set.arrow", {"tokens": ragged([[1, 2, 3], [4, 5], [6], [7, 8, 9, 10]])})
    feeds = [
        feed("input_ids", "tokens[:-1]"),
        feed("labels", "tokens[1:]", pad=-100),
        feed("fixed", "tokens", pad=9, length=5),
    ]
    step = next(reader(dataset, order=SampleOrder(4, 0, shuffle=False), feeds=feeds, accumulation=2))
    first, second = (batch.arrays for batch in step.micro_batches)
    assert first["input_ids"].tolist() == [[1, 2], [4, 0]]
    assert first["labels"].tolist() == [[2, 3], [5, -100]]
    assert first["fixed"].tolist() == [[1, 2, 3, 9, 9], [4, 5, 9, 9, 9]]
    assert second["labels"].tolist() == [[-100, -100, -100], [8, 9, 10]]


def test_order_by_length(tmp_path: Path) -> None:
    dataset = write_batches(
        tmp_path / "set.arrow",
        {"tokens": ragged([[1] * n for n in (3, 1, 2)]), "cost": np.array([5, 1, 9]), "x": np.ones((3, 2))},
    )

    def section(column: str) -> DataSection:
        return DataSection(
            train=DataSet(path="x"), micro_batch=1, shuffle=False, by_length=ByLength(column=column, bucket=2)
        )

    assert sample_order(dataset, section("tokens"), 0).indices(0, 0, 3).tolist() == [1, 2, 0]
    assert sample_order(dataset, section("cost"), 0).indices(0, 0, 3).tolist() == [1, 0, 2]
    for wrong in ("x", "missing"):
        with pytest.raises(UserError, match=r"data\.by_length\.column"):
            sample_order(dataset, section(wrong), 0)


@settings(deadline=None)
@given(st.integers(1, 59), st.integers(1, 8), st.integers(1, 5), st.none() | st.integers(1, 70), LAST)
def test_evaluation_takes_every_sample_once(
    sets: dict[int, Dataset], count: int, micro_batch: int, world_size: int, samples: int | None, last: LastBatch
) -> None:
    expected = list(range(min(count, samples or count)))

    def taken(rank: int, mode: Any) -> list[int]:
        batches = evaluation_batches(
            sets[count],
            NUMBER,
            micro_batch=micro_batch,
            rank=rank,
            world_size=world_size,
            mode=mode,
            last_batch=last,
            samples=samples,
        )
        numbers = []
        for batch in batches:
            rows = batch.arrays["number"]
            assert len(rows) == (micro_batch if last == "pad" else batch.count)
            numbers += rows[: batch.count].tolist()
        return numbers

    assert sorted(number for rank in range(world_size) for number in taken(rank, "partitioned")) == expected
    assert taken(0, "replicated") == taken(world_size - 1, "replicated") == expected


def reading_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("ortflow-data")]


def test_a_slow_reader_finds_the_next_batches_made() -> None:
    made: list[tuple[int, str]] = []

    def groups() -> Iterator[list[int]]:
        for number in range(10):
            made.append((number, threading.current_thread().name))
            yield [number]

    with ReadAhead(groups(), depth=2) as items:
        assert next(items) == 0
        time.sleep(0.01)
        assert next(items) == 1
        wait_until(lambda: len(made) >= 4)
        assert len(made) == 4, "at most two groups ahead"
        assert made[3][1].startswith("ortflow-data")
        assert list(items) == list(range(2, 10))
    wait_until(lambda: not reading_threads())


def test_a_fast_reader_needs_no_thread() -> None:
    names = ([threading.current_thread().name] for _ in range(20))
    assert set(ReadAhead(names, depth=2, worthwhile=60)) == {threading.current_thread().name}


def test_an_error_reaches_the_reader_and_ends_the_thread() -> None:
    def groups() -> Iterator[list[int]]:
        yield [0]
        yield [1]
        raise UserError("the disk is gone")

    items = ReadAhead(groups(), depth=2)
    assert next(items) == 0
    time.sleep(0.01)
    assert next(items) == 1
    time.sleep(0.01)
    with pytest.raises(UserError, match="the disk is gone"):
        next(items)
    assert list(items) == []
    wait_until(lambda: not reading_threads())


def test_the_thread_ends_with_its_reader(sets: dict[int, Dataset]) -> None:
    def fail() -> None:
        with reader(sets[50]) as steps:
            for step in steps:
                time.sleep(0.002)
                if step.epoch == 1:
                    raise RuntimeError("the consumer fails")

    with pytest.raises(RuntimeError, match="the consumer fails"):
        fail()
    wait_until(lambda: not reading_threads())
    forgotten = reader(sets[50])
    for _ in range(20):
        next(forgotten)
        time.sleep(0.001)
    del forgotten
    wait_until(lambda: not reading_threads())


def test_the_interpreter_exits_silently_while_reading(tmp_path: Path) -> None:
    numbered(tmp_path / "set.arrow", 50)
    program = (
        "import sys, threading, time\n"
        "from pathlib import Path\n"
        f"sys.path[:0] = {sys.path!r}\n"
        "from test_data_batches import reader\n"
        "from ortflow.workflow.data.dataset import Dataset\n"
        f"steps = reader(Dataset.open(Path({str(tmp_path / 'set.arrow')!r})))\n"
        "for _ in range(40):\n"
        "    next(steps); time.sleep(0.001)\n"
        "print(any(thread.name.startswith('ortflow-data') for thread in threading.enumerate()))\n"
    )
    environment_path = str(Path(__file__).parent)
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"import sys; sys.path.insert(0, {environment_path!r})\n" + program],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.strip() == "True"
