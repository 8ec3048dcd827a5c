"""Sums of a gradient over its rows: which ones the node of the gradient computes, and that they are right."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import pytest
from cuda_composed import check_same
from onnx import TensorProto, helper
from test_fusion_residual import WIDTH, gradient, model_of, node

from ortflow.workflow.cuda.table import HALF
from ortflow.workflow.fusion.groups import fuse
from ortflow.workflow.fusion.half import half
from ortflow.workflow.fusion.residual import add_residuals
from ortflow.workflow.fusion.summed import sum_in_norms
from ortflow.workflow.graph.domains import CUDA_DOMAIN
from ortflow.workflow.graph.ir.edit import attributes_of
from ortflow.workflow.graph.memory.element_types import element_types

OUTPUTS = ["sum", "dscale", "dbias", "b_grad"]


def sums(of: str, out: str = "b_grad", axes: int = 2) -> onnx.NodeProto:
    return node("ColumnSums", [of], out, domain=CUDA_DOMAIN, axes=axes)


def check(model: onnx.ModelProto) -> list[str]:
    """Check that the graph computes the same with sums in the norms; its operators after that."""
    random, whole = np.random.default_rng(0), (3, 6, WIDTH)
    sizes = {"dy": whole, "x": whole, "scale": (WIDTH,), "mean": (3, 6, 1), "inverse": (3, 6, 1), "g": whole}
    feeds = {name: random.normal(size=dims).astype("float32") for name, dims in sizes.items()}
    return check_same(model, sum_in_norms, feeds)


@pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])
def test_the_gradient_of_a_norm_is_summed_where_it_is_computed(rms: bool) -> None:
    model = model_of([gradient(rms), sums("dx")], ["dscale", "b_grad"])
    assert check(model) == [gradient(rms).op_type]


def test_the_sum_with_a_residual_is_summed() -> None:
    model = add_residuals(model_of([gradient(), node("Add", ["dx", "g"], "sum"), sums("sum")], ["dscale", "b_grad"]))
    assert check(model) == ["LayerNormalizationGrad"]


def test_a_second_sum_stays() -> None:
    model = model_of([gradient(), sums("dx"), sums("dx", "c_grad")], ["b_grad", "c_grad"])
    assert check(model) == ["LayerNormalizationGrad", "ColumnSums"]


@pytest.mark.parametrize("axes", [1, 3])
def test_sums_over_other_axes_stay(axes: int) -> None:
    model = model_of([gradient(), sums("dx", axes=axes)], ["b_grad"])
    assert check(model) == ["LayerNormalizationGrad", "ColumnSums"]


def test_sums_of_other_gradients_stay() -> None:
    outputs = ["b_grad", "dscale"]
    assert check(model_of([gradient(), sums("dbias", axes=0)], outputs)) == ["LayerNormalizationGrad", "ColumnSums"]
    nodes = [gradient(), node("Neg", ["dx"], "less"), sums("less")]
    assert check(model_of(nodes, outputs)) == ["LayerNormalizationGrad", "Neg", "ColumnSums"]


def test_a_value_whose_rank_is_not_known_is_summed_as_before() -> None:
    model = model_of([gradient(), sums("dx")], ["b_grad"])
    del model.graph.value_info[:]
    assert [one.op_type for one in sum_in_norms(model).graph.node] == ["LayerNormalizationGrad", "ColumnSums"]


def test_sums_stay_in_fp32() -> None:
    model = model_of([gradient(), sums("dx"), node("MatMul", ["dx", "w"], "sum")], OUTPUTS)
    model.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, (WIDTH, WIDTH)))
    found = half(sum_in_norms(model), TensorProto.FLOAT16, ["w", "scale"], HALF)
    types = element_types(found)
    (made,) = (one for one in found.graph.node if one.domain == CUDA_DOMAIN)
    assert [types[name] for name in made.output] == [TensorProto.FLOAT16, *[TensorProto.FLOAT] * 3]


def groups_of(*more: onnx.NodeProto, axes: int = 2, bias: Sequence[int | str] = (WIDTH,)) -> onnx.ModelProto:
    """The gradient of an activation behind a bias, y = (x + bias) dy, and its sums."""
    info = helper.make_tensor_value_info
    nodes = [
        node("Add", ["x", "bias"], "a"),
        node("Mul", ["a", "dy"], "y"),
        sums("y", axes=axes),
        *more,
    ]
    wide = ("batch", 6, WIDTH)
    graph = helper.make_graph(
        nodes,
        "graph",
        [info(name, TensorProto.FLOAT, dims) for name, dims in (("x", wide), ("dy", wide), ("bias", bias))],
        [info(name, TensorProto.FLOAT, None) for name in ("b_grad", *(one.output[0] for one in more))],
        value_info=[info(name, TensorProto.FLOAT, wide) for name in ("a", "y")],
    )
    imports = [helper.make_opsetid("", 18), helper.make_opsetid(CUDA_DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=9)


def fused(model: onnx.ModelProto) -> list[str]:
    return [one.op_type for one in fuse(model)[0].graph.node]


def test_a_group_sums_its_result_in_parts() -> None:
    found, _ = fuse(groups_of())
    group, adding = found.graph.node
    assert (group.op_type, adding.op_type) == ("FusedSums", "ColumnSums")
    assert list(adding.input) == [group.output[-1]]
    assert attributes_of(adding)["axes"] == 1
    assert attributes_of(group)["summed"] == 0


@pytest.mark.parametrize("bias", [(WIDTH,), (1,), (), ("batch", 6, WIDTH), (1, 6, WIDTH)], ids=str)
def test_what_may_stand_in_a_group_that_sums(bias: Sequence[int | str]) -> None:
    assert fused(groups_of(bias=bias)) == ["FusedSums", "ColumnSums"]


def test_a_result_that_does_not_depend_on_all_rows_is_summed_as_before() -> None:
    """In a run it could have fewer rows than the group, of which each would count several times."""
    info = helper.make_tensor_value_info
    model, wide = groups_of(node("Mul", ["y", "other"], "z")), ("batch", 6, WIDTH)
    model.graph.input.append(info("other", TensorProto.FLOAT, wide))
    model.graph.output[-1].CopyFrom(info("z", TensorProto.FLOAT, wide))
    assert fused(model) == ["Fused", "ColumnSums"]


@pytest.mark.parametrize("axes", [1, 3])
def test_other_axes_are_summed_as_before(axes: int) -> None:
    assert fused(groups_of(axes=axes)) == ["Fused", "ColumnSums"]


def test_of_two_sums_of_a_result_one_is_in_its_group() -> None:
    assert fused(groups_of(sums("y", "c_grad"))) == ["FusedSums", "ColumnSums", "ColumnSums"]
