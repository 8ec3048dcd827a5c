"""Micro-batches from columns: slices, padding, types, and several inputs of one column."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from data_sets import ragged, write_batches

from ortflow.workflow.data.dataset import Dataset
from ortflow.workflow.data.feed import Feed, collate
from ortflow.workflow.spec.mapping import parse_reference

WORDS = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10]]


def dataset(folder: Path) -> Dataset:
    values = np.arange(12, dtype=np.int32).reshape(4, 3)
    return write_batches(folder / "set.arrow", {"x": values, "words": ragged(WORDS)})


def feed(name: str, column: str, dtype: str = "int64", pad: float = 0, length: int | None = None) -> Feed:
    return Feed(name, np.dtype(dtype), parse_reference(column), pad, length)


def places(*batches: list[int]) -> list[np.ndarray]:
    return [np.array(batch, np.int64) for batch in batches]


def test_slices_of_one_column_fill_several_inputs(tmp_path: Path) -> None:
    feeds = [feed("whole", "x", "float32"), feed("start", "x[:-1]", "int32"), feed("end", "x[1:]")]
    first, second = collate(dataset(tmp_path), feeds, places([2, 0], [3]))
    assert [(name, array.dtype.name, array.tolist()) for name, array in first.items()] == [
        ("whole", "float32", [[6, 7, 8], [0, 1, 2]]),
        ("start", "int32", [[6, 7], [0, 1]]),
        ("end", "int64", [[7, 8], [1, 2]]),
    ]
    assert {name: array.tolist() for name, array in second.items()} == {
        "whole": [[9, 10, 11]], "start": [[9, 10]], "end": [[10, 11]],
    }  # fmt: skip
    assert all(array.flags.c_contiguous for array in (*first.values(), *second.values()))


def test_samples_are_padded_to_the_longest_of_their_micro_batch(tmp_path: Path) -> None:
    feeds = [feed("words", "words", "int64", pad=-100), feed("next", "words[1:]", "float32", pad=0.5, length=4)]
    first, second, third = collate(dataset(tmp_path), feeds, places([1, 2], [0], []))
    assert first["words"].tolist() == [[4, -100], [5, 6]]
    assert first["next"].tolist() == [[0.5, 0.5, 0.5, 0.5], [6, 0.5, 0.5, 0.5]]
    assert second["words"].tolist() == [[1, 2, 3]]
    assert second["next"].tolist() == [[2, 3, 0.5, 0.5]]
    assert (third["words"].shape, third["next"].shape) == ((0, 0), (0, 4))
    assert {array.dtype.name for array in (first["words"], third["words"])} == {"int64"}


def test_by_default_samples_are_padded_with_zeros(tmp_path: Path) -> None:
    words = Feed("words", np.dtype(np.int64), parse_reference("words"))
    (batch,) = collate(dataset(tmp_path), [words], places([1, 2]))
    assert batch["words"].tolist() == [[4, 0], [5, 6]]


def test_a_column_is_read_once(tmp_path: Path) -> None:
    given, read = dataset(tmp_path), list[str]()
    inner = given.read
    given.read = lambda name, indices: (read.append(name), inner(name, indices))[1]  # type: ignore[method-assign]
    collate(given, [feed("a", "x"), feed("b", "x[1:]")], places([0], [1], [2]))
    assert read == ["x"]
