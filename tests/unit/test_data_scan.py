"""Scans of a column: the first number out of its range and the first that is not finite, with its sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_sets import ragged, write_batches

from ortflow.workflow.data import scan
from ortflow.workflow.data.dataset import Dataset
from ortflow.workflow.data.scan import first_not_finite, first_outside
from ortflow.workflow.spec.mapping import ColumnReference

NAN, INFINITY = float("nan"), float("inf")
WHOLE = ColumnReference("x")


@pytest.fixture(autouse=True, params=[1, 2, 3, 100])
def _rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples are scanned in parts, whose size does not matter."""
    monkeypatch.setattr(scan, "ROWS", request.param)


def fixed(path: Path, *batches: Any) -> Dataset:
    return write_batches(path / "set", *({"x": np.array(batch, np.float32)} for batch in batches))


def test_the_first_number_outside(tmp_path: Path) -> None:
    numbers = fixed(tmp_path, [0, 1, 2, 3], [4, -5, 9, 6])
    assert first_outside(numbers, WHOLE, (0, 9)) == (5, -5.0)
    assert first_outside(numbers, WHOLE, (-5, 8)) == (6, 9.0)
    assert first_outside(numbers, WHOLE, (-5, 2)) == (3, 3.0)
    assert first_outside(numbers, WHOLE, (1, 9)) == (0, 0.0)
    assert first_outside(numbers, WHOLE, (-5, 9)) is None


def test_a_value_may_be_allowed_and_what_is_not_finite_is_another_fault(tmp_path: Path) -> None:
    numbers = fixed(tmp_path, [0, -100, 2], [-100, NAN, INFINITY, -101])
    assert first_outside(numbers, WHOLE, (0, 9), allowed=-100) == (6, -101.0)
    assert first_outside(numbers, WHOLE, (0, 9)) == (1, -100.0)
    assert first_outside(numbers, WHOLE, (-101, 9)) is None
    assert first_outside(numbers, WHOLE, (-100, 9), allowed=-101) is None


def test_a_recorded_range_saves_the_scan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, scans = fixed(tmp_path, [0, 1, 2]), list[str]()
    whole = Dataset.scan
    monkeypatch.setattr(Dataset, "scan", lambda self, name: (scans.append(name), whole(self, name))[1])
    assert first_outside(numbers, WHOLE, (0, 2)) is None
    assert first_not_finite(numbers, WHOLE) is None
    assert scans == []
    for span in ((1, 2), (0, 1)):
        assert first_outside(numbers, WHOLE, span) is not None
    assert scans == ["x", "x"]


def test_only_the_slice_of_a_sample_counts(tmp_path: Path) -> None:
    numbers = fixed(tmp_path, [[0, 1, 99], [2, 3, 99]], [[4, 50, 99]])
    assert first_outside(numbers, ColumnReference("x", None, -1), (0, 9)) == (2, 50.0)
    assert first_outside(numbers, ColumnReference("x", 0, 1), (0, 9)) is None
    assert first_outside(numbers, WHOLE, (0, 9)) == (0, 99.0)


@pytest.mark.parametrize("value", [NAN, INFINITY, -INFINITY])
def test_the_first_number_that_is_not_finite(tmp_path: Path, value: float) -> None:
    numbers = fixed(tmp_path, [[0, 1], [2, 3]], [[4, 5], [6, value], [value, 7]])
    place, found = first_not_finite(numbers, WHOLE) or (None, 0.0)
    assert place == 3
    assert np.array_equal(found, value, equal_nan=True)
    assert (first_not_finite(numbers, ColumnReference("x", 0, 1)) or (None,))[0] == 4
    assert first_not_finite(numbers, ColumnReference("x", 0, 0)) is None


def test_samples_of_different_length(tmp_path: Path) -> None:
    samples = write_batches(
        tmp_path / "set", {"x": ragged([[], [1, 2], [], [3]])}, {"x": ragged([[], [4, 5, 60], [7]])}
    )
    assert first_outside(samples, WHOLE, (1, 59)) == (5, 60.0)
    assert first_outside(samples, WHOLE, (2, 60)) == (1, 1.0)
    assert first_outside(samples, WHOLE, (1, 60)) is None
    assert first_outside(samples, ColumnReference("x", None, -1), (1, 4)) == (5, 5.0)
    assert first_not_finite(samples, WHOLE) is None


def test_integers_are_finite(tmp_path: Path) -> None:
    numbers = write_batches(tmp_path / "set", {"x": np.array([1, 1 << 62])})
    assert first_not_finite(numbers, WHOLE) is None
    assert first_outside(numbers, WHOLE, (0, 1 << 61)) == (1, float(1 << 62))
