"""Gradients of operators that read or write at given indices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gradients import check, gradients_of, model_of

from ortflow.workflow.graph.autodiff.reverse import differentiate

RANDOM = np.random.default_rng(0)


def numbers(*shape: int) -> np.ndarray:
    """Numbers that are all different, none of them near 0 or another."""
    return (RANDOM.permutation(int(np.prod(shape))) + 1.0).reshape(shape) / 8


def places(limit: int, *shape: int) -> np.ndarray:
    """Indices on an axis of length `limit`, some from its end, some twice."""
    return RANDOM.integers(-limit, limit, shape)


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2, -3])
@pytest.mark.parametrize("shape", [(), (4,), (2, 3)], ids=str)
def test_gather(axis: int, shape: tuple[int, ...]) -> None:
    data = numbers(2, 3, 4)
    check("Gather", {"data": data, "i": places(data.shape[axis], *shape)}, ["data"], axis=axis)


@pytest.mark.parametrize("place", [np.int64(1), np.array([-2])], ids=["number", "vector"])
def test_one_known_place_is_put_back_without_indices(place: np.ndarray) -> None:
    inputs = {"data": numbers(2, 3, 4), "i": np.asarray(place)}
    check("Gather", inputs, ["data"], axis=1)
    graph = differentiate(model_of("Gather", inputs, ["data"], axis=1), ["data"], "loss")[0].graph
    assert not {"GatherGrad", "ScatterElements"} & {node.op_type for node in graph.node}


def test_gather_of_a_vector_and_by_default() -> None:
    check("Gather", {"data": numbers(5), "xi": places(5, 7).astype(np.int32)}, ["data"])
    check("Gather", {"data": numbers(5, 2), "xi": places(5, 1)}, ["data"])


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_gather_elements(axis: int) -> None:
    data = numbers(3, 4)
    shape = (2, 4) if axis == 0 else (3, 6)
    inputs = {"data": data, "i": places(data.shape[axis], *shape)}
    check("GatherElements", inputs, ["data"], {"axis": axis % 2}, axis=axis)


@pytest.mark.parametrize(
    ("batch", "shape", "limits"),
    [(0, (2, 5), (2, 3)), (0, (4,), (2, 3, 4)), (1, (2, 5), (3,)), (1, (2,), (3, 4)), (2, (2, 3), (4,)), (0, (), (2,))],
)
def test_gather_nd(batch: int, shape: tuple[int, ...], limits: tuple[int, ...]) -> None:
    indices = np.stack([places(limit, *shape) for limit in limits], axis=-1)
    inputs = {"data": numbers(2, 3, 4), "i": indices}
    check("GatherND", inputs, ["data"], batch_dims=batch)


@pytest.mark.parametrize("wanted", [["data", "updates"], ["data"], ["updates"]], ids=str)
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("reduction", ["none", "add", "mul", "max", "min"])
def test_scatter_elements(reduction: str, axis: int, wanted: list[str]) -> None:
    data = numbers(3, 4)
    if reduction == "none":
        # Which of two writes to one element is last is undefined.
        indices = RANDOM.permuted(np.tile(np.arange(data.shape[axis]), (2, 1)), axis=1)
        indices = indices.T if axis == 0 else indices
    else:
        indices = places(data.shape[axis], *((5, 2) if axis == 0 else (2, 5)))
    updates = numbers(*indices.shape) + 1 / 16
    names = {name: name if name in wanted else f"x{name}" for name in ("data", "updates")}
    inputs = {names["data"]: data, "xi": indices, names["updates"]: updates}
    check("ScatterElements", inputs, wanted, axis=axis, reduction=reduction)


@pytest.mark.parametrize("zeros", [1, 2])
def test_products_of_zeros(zeros: int) -> None:
    updates = numbers(1, 4)
    updates[0, :zeros] = 0
    check(
        "ScatterElements",
        {"data": numbers(1, 2), "i": np.array([[0, 0, 0, 1]]), "updates": updates},
        ["data", "updates"],
        axis=1,
        reduction="mul",
    )


@pytest.mark.parametrize("reduction", ["max", "min"])
def test_equal_extremes_share_the_gradient(reduction: str) -> None:
    inputs = {"data": np.array([1.0, 5.0]), "i": np.array([0, 0, 1]), "updates": np.array([1.0, 1.0, 5.0])}
    model = model_of("ScatterElements", inputs, ["data", "updates"], reduction=reduction)
    found = gradients_of(model, inputs, ["data", "updates"])
    np.testing.assert_allclose(found["data"], [1.5 / 3, 5.5 / 2], rtol=1e-6)
    np.testing.assert_allclose(found["updates"], [1.5 / 3, 1.5 / 3, 5.5 / 2], rtol=1e-6)


@pytest.mark.parametrize("reduction", ["none", "add"])
def test_scatter_nd(reduction: str) -> None:
    indices = np.array([[0, 2], [1, -1], [1, 0]])
    inputs = {"data": numbers(2, 3, 4), "i": indices, "updates": numbers(3, 4)}
    check("ScatterND", inputs, ["data", "updates"], reduction=reduction)


@pytest.mark.parametrize("options", [{}, {"axis": 0}, {"axis": 1, "largest": 0}, {"axis": -2}], ids=str)
def test_top_k(options: dict[str, Any]) -> None:
    check("TopK", {"data": numbers(3, 4), "k": np.array([2])}, ["data"], outputs=2, **options)


@pytest.mark.parametrize("axis", [None, 0, 1, -1])
def test_compress(axis: int | None) -> None:
    data = numbers(3, 4)
    chosen = np.array([False, True, True])
    options = {} if axis is None else {"axis": axis}
    check("Compress", {"data": data, "xchosen": chosen}, ["data"], **options)
