"""Gradients of operators that work element by element."""

from __future__ import annotations

import numpy as np
import pytest
from gradients import check, model_of

from ortflow.workflow.graph.autodiff.reverse import differentiate

RANDOM = np.random.default_rng(0)
SHAPES = [((2, 3), (2, 3)), ((2, 3), (3,)), ((1, 3), (2, 1)), ((), (2, 3)), ((2, 1, 3), (4, 1)), ((4,), (3, 2, 1))]


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("operator", ["Add", "Sub", "Mul", "Div"])
def test_arithmetic(operator: str, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    a, b = (RANDOM.uniform(0.5, 2, shape) for shape in shapes)
    check(operator, {"a": a, "b": b}, ["a", "b"])
    check(operator, {"a": a, "xb": b}, ["a"])
    check(operator, {"xa": a, "b": b}, ["b"])


@pytest.mark.parametrize("operator", ["Add", "Sub", "Mul", "Div"])
def test_known_sizes_need_no_work_to_find_the_broadcast_axes(operator: str) -> None:
    a, b = np.ones((2, 3)), np.ones((1, 3))
    for whole, part in (("a", "b"), ("b", "a")):
        model = model_of(operator, {"a": a, "b": b} if whole == "a" else {"a": b, "b": a}, ["a", "b"])
        made, _ = differentiate(model, ["a", "b"], "loss")
        operators = [node.op_type for node in made.graph.node if node.name.startswith("node_Grad")]
        assert "Shape" not in operators, (whole, operators)
        assert operators.count("ReduceSum") == 1, (part, operators)
