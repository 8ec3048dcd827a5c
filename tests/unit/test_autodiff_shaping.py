"""Gradients of operators that move elements."""

from __future__ import annotations

import numpy as np
import pytest
from gradients import check

RANDOM = np.random.default_rng(7)


def normal(*shape: int) -> np.ndarray:
    return RANDOM.normal(size=shape)


@pytest.mark.parametrize("shape", [(4, 6), (-1,), (0, -1), (1, 2, 3, 4, 1)], ids=str)
def test_reshape(shape: tuple[int, ...]) -> None:
    check("Reshape", {"a": normal(2, 3, 4), "shape": np.array(shape)}, ["a"])
    if 0 not in shape:
        check("Reshape", {"a": normal(2, 3, 4), "xshape": np.array(shape)}, ["a"], allowzero=1)


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_flatten(axis: int) -> None:
    check("Flatten", {"a": normal(2, 3, 4)}, ["a"], axis=axis)


@pytest.mark.parametrize("axes", [None, [1], [-1, 1]], ids=str)
def test_squeeze(axes: list[int] | None) -> None:
    inputs = {"a": normal(2, 1, 3, 1)}
    check("Squeeze", inputs if axes is None else {**inputs, "axes": np.array(axes)}, ["a"])


@pytest.mark.parametrize("axes", [[0], [-1], [1, -1], [3, 0]], ids=str)
def test_unsqueeze(axes: list[int]) -> None:
    check("Unsqueeze", {"a": normal(2, 3), "axes": np.array(axes)}, ["a"])
    check("Unsqueeze", {"a": normal(2, 3), "xaxes": np.array(axes)}, ["a"])


@pytest.mark.parametrize("order", [None, [0, 2, 1], [2, 0, 1], [1, 2, 0]], ids=str)
def test_transpose(order: list[int] | None) -> None:
    check("Transpose", {"a": normal(2, 3, 4)}, ["a"], **({} if order is None else {"perm": order}))


@pytest.mark.parametrize("shape", [(2, 3, 4), (3, 4), (5, 2, 3, 4), (1, 1), (2, 1, 1)], ids=str)
def test_expand(shape: tuple[int, ...]) -> None:
    for a in (normal(3, 1), normal(1, 1), normal(1)):
        if shape[-2] in (a.shape[0], 1) or a.shape[0] == 1:
            check("Expand", {"a": a, "shape": np.array(shape)}, ["a"])
            check("Expand", {"a": a, "xshape": np.array(shape)}, ["a"])


@pytest.mark.parametrize("repeats", [(1, 1, 1), (2, 1, 3), (3, 2, 1)], ids=str)
def test_tile(repeats: tuple[int, ...]) -> None:
    check("Tile", {"a": normal(2, 3, 4), "repeats": np.array(repeats)}, ["a"])
    check("Tile", {"a": normal(2, 3, 4), "xrepeats": np.array(repeats)}, ["a"])


@pytest.mark.parametrize("wanted", [["a", "b", "c"], ["b"], ["c", "a"], ["a", "b"]], ids=str)
@pytest.mark.parametrize("axis", [0, 1, -1, -2])
def test_concat(axis: int, wanted: list[str]) -> None:
    inputs = {}
    for length, name in enumerate("abc", 1):
        shape = [2, 3, 4]
        shape[axis] = length
        inputs[name if name in wanted else f"x{name}"] = normal(*shape)
    check("Concat", inputs, sorted(wanted), axis=axis)


def test_concat_of_one_and_of_one_value_twice() -> None:
    check("Concat", {"a": normal(2, 3)}, ["a"], axis=1)


@pytest.mark.parametrize("uses", [(0, 1, 2), (1,), (0, 2), (2,)], ids=str)
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_split(axis: int, uses: tuple[int, ...]) -> None:
    shape = [2, 3, 4]
    shape[axis] = 6
    lengths = np.array([1, 3, 2])
    check("Split", {"a": normal(*shape), "split": lengths}, ["a"], outputs=3, uses=uses, axis=axis)
    check("Split", {"a": normal(*shape), "xsplit": lengths}, ["a"], outputs=3, uses=uses, axis=axis)
    check("Split", {"a": normal(*shape)}, ["a"], outputs=3, uses=uses, axis=axis, num_outputs=3)


def test_split_into_parts_of_other_lengths() -> None:
    check("Split", {"a": normal(7, 2)}, ["a"], outputs=3, uses=(1, 2), num_outputs=3)


@pytest.mark.parametrize("count", [1, 2])
def test_split_into_few_parts(count: int) -> None:
    inputs = {"a": normal(4, 3), "split": np.array([4] if count == 1 else [1, 3])}
    check("Split", inputs, ["a"], outputs=count, uses=tuple(range(count)))


@pytest.mark.parametrize("axes", [None, (0, 1), (1, 0)], ids=str)
def test_reverse_sequence(axes: tuple[int, int] | None) -> None:
    time, batch = axes or (0, 1)
    shape = [2, 3, 4]
    inputs = {"a": normal(*shape), "lengths": RANDOM.integers(1, shape[time] + 1, shape[batch])}
    check("ReverseSequence", inputs, ["a"], **({} if axes is None else {"time_axis": time, "batch_axis": batch}))


@pytest.mark.parametrize("upper", [0, 1])
@pytest.mark.parametrize("offset", [None, 0, 1, -2])
def test_triangle(offset: int | None, upper: int) -> None:
    inputs = {"a": normal(2, 4, 3)}
    if offset is not None:
        inputs["offset"] = np.array(offset)
    check("Trilu", inputs, ["a"], upper=upper)


@pytest.mark.parametrize("mode", ["DCR", "CRD"])
def test_depth_to_space(mode: str) -> None:
    check("DepthToSpace", {"a": normal(2, 12, 2, 3)}, ["a"], blocksize=2, mode=mode)


def test_space_to_depth() -> None:
    check("SpaceToDepth", {"a": normal(2, 3, 4, 6)}, ["a"], blocksize=2)
