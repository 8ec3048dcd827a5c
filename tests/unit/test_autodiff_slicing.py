"""Gradients of Slice and Pad."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gradients import check
from onnx.reference.op_run import OpRun

RANDOM = np.random.default_rng(8)
LAST = 2**31 - 1
A = RANDOM.normal(size=(3, 5, 4))
SLICES: list[tuple[list[int], list[int], list[int] | None, list[int] | None]] = [
    ([1], [3], None, None),
    ([1, 2], [3, 4], None, None),
    ([-3], [-1], [1], None),
    ([2], [LAST], [-2], [1]),
    ([0, 1], [LAST, LAST], [-1, 0], [1, 1]),
    ([-100, 1], [100, 2], [2, 1], None),
    ([0], [LAST], [1], [2]),
    ([1], [LAST], [1], [2]),
    ([-1], [-LAST], [1], [-1]),
    ([3, 0], [0, 3], [1, 0], [-2, 1]),
    ([-1, -1], [-LAST, -2], [0, 2], [-2, -1]),
    ([0], [LAST], None, None),
]


@pytest.mark.parametrize("case", SLICES, ids=str)
@pytest.mark.parametrize("kind", [np.int64, np.int32])
@pytest.mark.parametrize("prefix", ["", "x"])
def test_slice(case: tuple[Any, ...], kind: Any, prefix: str) -> None:
    names = [f"{prefix}starts", f"{prefix}ends", "axes", f"{prefix}steps"]
    given = {name: None if value is None else np.array(value, kind) for name, value in zip(names, case, strict=True)}
    while given and list(given.values())[-1] is None:
        given.popitem()
    check("Slice", {"a": A, **given}, ["a"])


def test_slice_along_computed_axes() -> None:
    given = {"xstarts": np.array([1, 1]), "xends": np.array([4, 3]), "xaxes": np.array([-2, 2])}
    check("Slice", {"a": A, **given}, ["a"])


class Pad(OpRun):
    """onnx's own implementation does not support negative widths."""

    def _run(self, x: Any, pads: Any, value: Any = None, axes: Any = None, mode: Any = None) -> Any:
        kept = x[tuple(slice(max(0, -a), n - max(0, -b)) for a, b, n in zip(pads[:3], pads[3:], x.shape, strict=True))]
        widths = [(max(0, a), max(0, b)) for a, b in zip(pads[:3], pads[3:], strict=True)]
        return (np.pad(kept, widths, constant_values=0.0 if value is None else value),)


@pytest.mark.parametrize("pads", [(0, 1, 2, 1, 0, 2), (0, -1, 1, -1, 2, 0), (0,) * 6], ids=str)
@pytest.mark.parametrize("prefix", ["", "x"])
def test_constant_padding(pads: tuple[int, ...], prefix: str) -> None:
    check("Pad", {"a": A, f"{prefix}pads": np.array(pads)}, ["a"], new_ops=[Pad])
    check("Pad", {"a": A, f"{prefix}pads": np.array(pads), "value": np.array(2.0)}, ["a"], new_ops=[Pad])


@pytest.mark.parametrize("prefix", ["", "x"])
@pytest.mark.parametrize("mode", ["reflect", "edge"])
def test_padding_by_elements(mode: str, prefix: str) -> None:
    check("Pad", {"a": A, f"{prefix}pads": np.array([0, 1, 2, 1, 0, 2])}, ["a"], mode=mode)


@pytest.mark.parametrize("mode", ["constant", "reflect", "edge"])
def test_padding_along_some_axes(mode: str) -> None:
    given = {"pads": np.array([1, 2, 0, 3]), "value": None, "axes": np.array([-1, 1])}
    check("Pad", {"a": A, **given}, ["a"], mode=mode)
