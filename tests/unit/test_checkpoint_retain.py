from __future__ import annotations

import os
from pathlib import Path

import pytest
from checkpoints import newest_whole, save, state
from hypothesis import given
from hypothesis import strategies as st

from ortflow.workflow.checkpoint.retain import expired, prune
from ortflow.workflow.checkpoint.store import DirectoryStore

BUFFERS = state(0)


@pytest.mark.parametrize(
    ("newest", "every", "gone"),
    [
        (1, None, [10, 20, 30, 40]),
        (2, None, [10, 20, 30]),
        (5, None, []),
        (9, None, []),
        (2, 20, [10, 30]),
        (1, 25, [10, 20, 30, 40]),
        (1, 1, []),
    ],
)
def test_expired(newest: int, every: int | None, gone: list[int]) -> None:
    assert expired([50, 10, 30, 20, 40], newest, every) == gone


@given(st.sets(st.integers(0, 10_000)), st.integers(1, 9), st.one_of(st.none(), st.integers(1, 50)))
def test_expired_keeps_the_newest_and_the_multiples(steps: set[int], newest: int, every: int | None) -> None:
    gone = set(expired(list(steps), newest, every))
    kept = steps - gone
    assert set(sorted(steps)[-newest:]) <= kept
    assert len(kept) >= min(newest, len(steps))
    for step in steps - set(sorted(steps)[-newest:]):
        assert (step in kept) == (every is not None and step % every == 0)


def store_of(path: Path, *steps: int) -> DirectoryStore:
    store = DirectoryStore(path)
    for step in steps:
        save(store, step, BUFFERS)
    return store


def test_prune(tmp_path: Path) -> None:
    store = store_of(tmp_path, 5, 10, 15, 20, 25, 30)
    assert prune(store, 2, 10) == [5, 15]
    assert store.steps() == [10, 20, 25, 30]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{step:08d}" for step in (10, 20, 25, 30)]


def test_damaged_ones_are_neither_deleted_nor_counted(tmp_path: Path) -> None:
    store = store_of(tmp_path, 10, 20, 30, 40, 50, 60)
    (store.place(60) / "COMMITTED").unlink()
    os.truncate(store.place(50) / "rank-0000.safetensors", 100)
    (store.place(10) / "manifest.json").unlink()
    assert prune(store, 2) == [20]
    assert store.steps() == [10, 30, 40, 50, 60]
    assert newest_whole(store) == 40


def test_one_found_corrupt_when_read_does_not_count_among_the_newest(tmp_path: Path) -> None:
    store = store_of(tmp_path, 10, 20, 30)
    assert prune(store, 2, distrusted={30}) == []
    assert store.steps() == [10, 20, 30]
