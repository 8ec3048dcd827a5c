"""Gradients of matrix products."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gradients import check, differences_of, gradients_of, model_of
from onnx.reference.op_run import OpRun

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.autodiff.reverse import differentiate
from ortflow.workflow.graph.operators.linear import _wider

RANDOM = np.random.default_rng(4)
PRODUCTS = [
    ((3, 4), (4, 5)),
    ((2, 3, 4), (4, 5)),
    ((2, 3, 4), (2, 4, 5)),
    ((2, 1, 3, 4), (2, 4, 5)),
    ((3, 4), (2, 4, 5)),
    ((1, 3, 4), (6, 2, 4, 5)),
    ((1, 3, 4), (4, 5)),
    ((2, 3, 4), (1, 4, 5)),
    ((4,), (4, 5)),
    ((4,), (2, 4, 5)),
    ((3, 4), (4,)),
    ((2, 3, 4), (4,)),
    ((4,), (4,)),
    ((1, 1), (1, 1)),
]


def normal(*shape: int) -> np.ndarray:
    return RANDOM.normal(size=shape)


class FusedMatMul(OpRun):
    op_domain = "com.microsoft"

    def _run(self, a: Any, b: Any, alpha: Any = None, transA: Any = None, transB: Any = None) -> Any:  # noqa: N803
        a, b = (np.swapaxes(v, -1, -2) if turn else v for v, turn in ((a, transA), (b, transB)))
        return ((a @ b) * (alpha or 1.0),)


@pytest.mark.parametrize("shapes", PRODUCTS, ids=str)
def test_product(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    a, b = (normal(*shape) for shape in shapes)
    check("MatMul", {"a": a, "b": b}, ["a", "b"])
    check("MatMul", {"a": a, "xb": b}, ["a"])
    check("MatMul", {"xa": a, "b": b}, ["b"])


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (1, 1, 1), (1, 4, 4), (4, 4, 4), ("n", 1, "n"), ("n", "n", "n"), ("n", 4, 4), ("n", "m", None), (None, 1, None),
        (None, 4, 4), (None, "n", None), (None, None, None),
    ],
)  # fmt: skip
def test_the_size_of_a_broadcast_axis(one: int | str | None, other: int | str | None, expected: Any) -> None:
    """A size that is not known is 1 or the known one."""
    assert _wider(one, other) == _wider(other, one) == expected


def test_a_weight_that_is_shared_by_a_batch_of_any_size() -> None:
    inputs = {"xa": normal(2, 3, 4), "b": normal(1, 4, 5)}
    model = model_of("MatMul", inputs, ["b"])
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "batch"
    precise = model_of("MatMul", inputs, ["b"], real="float64")
    expected = differences_of(precise, inputs, ["b"])["b"]
    np.testing.assert_allclose(gradients_of(model, inputs, ["b"])["b"], expected, rtol=2e-4, atol=2e-5)


def test_gradient_of_a_weight_is_one_product_over_all_rows() -> None:
    model = model_of("MatMul", {"xa": normal(2, 3, 4), "w": normal(4, 5)}, ["w"])
    made, _ = differentiate(model, ["w"], "loss")
    assert [node.op_type for node in made.graph.node if "w_grad" in node.output] == ["Gemm"]


@pytest.mark.parametrize("bias", [None, (), (1,), (5,), (1, 5), (3, 1), (3, 5)], ids=str)
@pytest.mark.parametrize("turn_a", [0, 1])
@pytest.mark.parametrize("turn_b", [0, 1])
def test_general_product(turn_a: int, turn_b: int, bias: tuple[int, ...] | None) -> None:
    a = normal(*((4, 3) if turn_a else (3, 4)))
    b = normal(*((5, 4) if turn_b else (4, 5)))
    inputs = {"a": a, "b": b, "c": None if bias is None else normal(*bias)}
    attributes = {"transA": turn_a, "transB": turn_b, "alpha": 0.5, "beta": 2.0}
    check("Gemm", inputs, ["a", "b"] if bias is None else ["a", "b", "c"], **attributes)


def test_general_product_by_default() -> None:
    check("Gemm", {"a": normal(3, 4), "b": normal(4, 5), "c": normal(5)}, ["a", "b", "c"])
    check("Gemm", {"xa": normal(3, 4), "b": normal(4, 5)}, ["b"])


@pytest.mark.parametrize("shapes", [((2, 3, 4), (2, 4, 5)), ((3, 4), (4, 5)), ((2, 3, 4), (4, 5))], ids=str)
@pytest.mark.parametrize("turns", [(0, 0), (0, 1), (1, 0), (1, 1)], ids=str)
def test_fused_product(shapes: tuple[tuple[int, ...], tuple[int, ...]], turns: tuple[int, int]) -> None:
    a, b = (
        np.swapaxes(normal(*shape), -1, -2) if turn else normal(*shape)
        for shape, turn in zip(shapes, turns, strict=True)
    )
    attributes = {"transA": turns[0], "transB": turns[1], "alpha": 0.5}
    check("FusedMatMul", {"a": a, "b": b}, ["a", "b"], domain="com.microsoft", new_ops=[FusedMatMul], **attributes)


def test_a_fused_product_that_turns_batch_axes_is_refused() -> None:
    inputs = {"a": normal(3, 2, 4), "b": normal(2, 4, 5)}
    model = model_of("FusedMatMul", inputs, ["a"], domain="com.microsoft", transBatchA=1)
    with pytest.raises(UserError, match="it transposes batch axes"):
        differentiate(model, ["a"], "loss")
