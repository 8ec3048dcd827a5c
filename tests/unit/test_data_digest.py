"""The hash of a set's samples: other samples change it, other files do not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from data_sets import ragged, write_batches

from ortflow.workflow.data.dataset import Dataset
from ortflow.workflow.data.digest import digest_of
from ortflow.workflow.data.write import record_batch, write_set


def samples(count: int = 60) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {"x": random.normal(size=(count, 5)).astype(np.float32), "labels": random.integers(0, 3, count)}


def digest(path: Path, whole: int = 1 << 20, **changed: np.ndarray) -> str:
    write_batches(path, {**samples(), **changed})
    return digest_of(Dataset.open(path), whole)


@pytest.mark.parametrize("whole", [1 << 20, 400])
def test_other_samples_have_another_hash(tmp_path: Path, whole: int) -> None:
    expected = digest(tmp_path / "a.arrow", whole)
    assert digest(tmp_path / "b.arrow", whole) == expected
    for place in (0, 59):  # of a large set, the first and the last sample are among those that are hashed
        values = samples()["x"]
        values[place, 4] += 1e-6
        assert digest(tmp_path / f"{place}.arrow", whole, x=values) != expected
    assert digest(tmp_path / "d.arrow", whole, labels=samples()["labels"].astype(np.int32)) != expected


def test_the_order_counts_and_the_files_do_not(tmp_path: Path) -> None:
    values = samples()
    folder = tmp_path / "shards"
    folder.mkdir()
    for number, (start, end) in enumerate([(0, 7), (7, 8), (8, 60)]):
        part = {name: array[start:end] for name, array in values.items()}
        write_set(folder / f"{number}.arrow", [record_batch(part)])
    expected = digest(tmp_path / "a.arrow")
    assert digest_of(Dataset.open(folder)) == expected
    assert digest(tmp_path / "b.arrow", x=values["x"][::-1].copy()) != expected


def test_where_one_sample_ends_counts(tmp_path: Path) -> None:
    found = set()
    for number, cut in enumerate((2, 3)):
        tokens = list(range(5))
        found.add(
            digest_of(write_batches(tmp_path / f"{number}.arrow", {"tokens": ragged([tokens[:cut], tokens[cut:]])}))
        )
    assert len(found) == 2


@pytest.mark.parametrize(("whole", "hashed"), [(1680, 60), (1 << 20, 60), (1679, 59), (400, 14), (1, 2)])
def test_how_many_samples_of_a_large_set_count(tmp_path: Path, whole: int, hashed: int) -> None:
    """The set has 1,680 bytes: it is hashed as a whole, or about as many bytes of it."""
    expected = digest(tmp_path / "a.arrow", whole)
    other = 0
    for place in range(60):
        values = samples()["x"]
        values[place] += 1
        other += digest(tmp_path / f"{place}.arrow", whole, x=values) != expected
    assert other == hashed
