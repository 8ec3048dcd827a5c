"""Sums of a norm's gradient with its residual: which ones the norm's node computes, and that they are right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from cuda_composed import check_same
from onnx import TensorProto, helper

from ortflow.workflow.cuda.table import HALF
from ortflow.workflow.fusion.half import half
from ortflow.workflow.fusion.residual import add_residuals
from ortflow.workflow.graph.domains import CUDA_DOMAIN
from ortflow.workflow.graph.memory.element_types import element_types

ROWS, WIDTH = ("batch", 6), 8


def node(operator: str, given: Sequence[str], *made: str, domain: str = "", **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(operator, given, made, name=f"/{made[0]}", domain=domain, **attributes)


def gradient(rms: bool = False, dy: str = "dy", dx: str = "dx", more: str = "") -> onnx.NodeProto:
    name = "RMSNormalizationGrad" if rms else "LayerNormalizationGrad"
    given, made = [dy, "x", "scale", *([] if rms else ["mean"]), "inverse"], [dx, f"dscale{more}"]
    return node(name, given, *made, *([] if rms else [f"dbias{more}"]), domain=CUDA_DOMAIN)


def model_of(
    nodes: Sequence[onnx.NodeProto],
    outputs: Sequence[str] = ("sum", "dscale"),
    residual: Sequence[int | str] | None = None,
) -> onnx.ModelProto:
    wide, column = (*ROWS, WIDTH), (*ROWS, 1)
    shapes = {"dy": wide, "x": wide, "scale": (WIDTH,), "mean": column, "inverse": column, "g": residual or wide}
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "graph",
        [info(name, TensorProto.FLOAT, dims) for name, dims in shapes.items()],
        [info(name, TensorProto.FLOAT, None) for name in outputs],
        value_info=[
            info(name, TensorProto.FLOAT, wide)
            for one in nodes for name in one.output
            if not name.startswith(("dscale", "dbias")) and name not in outputs
        ],
    )  # fmt: skip
    imports = [helper.make_opsetid("", 18), helper.make_opsetid(CUDA_DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=9)


def check(model: onnx.ModelProto, residual: tuple[int, ...] = (3, *ROWS[1:], WIDTH)) -> list[str]:
    """Check that the graph computes the same with residuals; its operators after that."""
    random, whole = np.random.default_rng(0), (3, 6, WIDTH)
    sizes = {"dy": whole, "x": whole, "scale": (WIDTH,), "mean": (3, 6, 1), "inverse": (3, 6, 1), "g": residual}
    feeds = {name: random.normal(size=dims).astype("float32") for name, dims in sizes.items()}
    return check_same(model, add_residuals, feeds)


@pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])
@pytest.mark.parametrize("turned", [False, True], ids=["dx + g", "g + dx"])
def test_a_sum_with_the_gradient_past_the_norm_is_made_by_the_norm(rms: bool, turned: bool) -> None:
    add = node("Add", ("g", "dx") if turned else ("dx", "g"), "sum")
    assert check(model_of([gradient(rms), add])) == [gradient(rms).op_type]


def test_what_is_added_may_be_made_later() -> None:
    nodes = [gradient(), node("Neg", ["g"], "past"), node("Add", ["dx", "past"], "sum")]
    assert check(model_of(nodes)) == ["Neg", "LayerNormalizationGrad"]


def test_two_norms_of_one_value_are_a_chain() -> None:
    nodes = [
        gradient(dx="dx1", more="1"),
        gradient(dy="g", dx="dx2", more="2"),
        node("Add", ["dx1", "dx2"], "both"),
        node("Add", ["both", "x"], "sum"),
    ]
    outputs = ["sum", "dscale1", "dscale2"]
    assert check(model_of(nodes, outputs)) == ["LayerNormalizationGrad"] * 2 + ["Add"]


def test_a_gradient_that_is_read_elsewhere_stays() -> None:
    both = ["LayerNormalizationGrad", "Add"]
    add = node("Add", ["dx", "g"], "sum")
    assert check(model_of([gradient(), add, node("Neg", ["dx"], "less")], ["sum", "less"])) == [*both, "Neg"]
    assert check(model_of([gradient(), add], ["sum", "dx"])) == both
    assert check(model_of([gradient(), node("Add", ["dx", "dx"], "sum")])) == both


@pytest.mark.parametrize("dims", [(WIDTH,), (1, 6, WIDTH), ("other", 6, WIDTH)], ids=str)
def test_what_may_have_another_shape_is_added_as_before(dims: tuple[int | str, ...]) -> None:
    sizes = tuple(size if isinstance(size, int) else 3 for size in dims)
    model = model_of([gradient(), node("Add", ["dx", "g"], "sum")], residual=dims)
    assert check(model, sizes) == ["LayerNormalizationGrad", "Add"]


def test_what_is_computed_from_the_gradient_of_the_scale_is_added_as_before() -> None:
    nodes = [gradient(), node("Mul", ["g", "dscale"], "late"), node("Add", ["dx", "late"], "sum")]
    assert check(model_of(nodes)) == ["LayerNormalizationGrad", "Mul", "Add"]


@pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])
def test_a_residual_that_is_stored_as_half_is_read_as_such(rms: bool) -> None:
    nodes = [
        node("MatMul", ["dy", "w"], "of_y"),
        node("MatMul", ["g", "w"], "past"),
        gradient(rms, dy="of_y"),
        node("Add", ["past", "dx"], "whole"),
        node("MatMul", ["whole", "w"], "sum"),
    ]
    model = model_of(nodes)
    model.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, (WIDTH, WIDTH)))
    found = half(add_residuals(model), TensorProto.FLOAT16, ["w", "scale"], HALF)
    types = element_types(found)
    (made,) = (one for one in found.graph.node if one.domain == CUDA_DOMAIN)
    assert types[made.input[0]] == types[made.input[-1]] == types[made.output[0]] == TensorProto.FLOAT16
    assert [one.op_type for one in found.graph.node].count("Cast") == 4, "of the products' inputs, and of the result"
