"""Products of halves by cuBLASLt: the nodes that they absorb, and that the graph computes the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from ortflow.workflow.cuda.operators import Tensor
from ortflow.workflow.cuda.product import shape_of
from ortflow.workflow.errors import OrtflowError
from ortflow.workflow.fusion.products import put_products
from ortflow.workflow.graph.domains import CUDA_DOMAIN
from ortflow.workflow.graph.ir import shapes

HALF = TensorProto.FLOAT16


class Product(OpRun):
    op_domain = CUDA_DOMAIN

    def _run(self, a: Any, b: Any, bias: Any = None, turn_a: int = 0, turn_b: int = 0) -> tuple[Any]:
        made = (a.T if turn_a else a).astype(np.float32) @ (b.T if turn_b else b).astype(np.float32)
        return ((made if bias is None else made + bias).astype(np.float16),)


class FusedMatMul(OpRun):
    op_domain = "com.microsoft"

    def _run(self, a: Any, b: Any, transA: int = 0, transB: int = 0, alpha: float = 1.0) -> tuple[Any]:  # noqa: N803
        return (((a.T if transA else a) @ (b.T if transB else b) * np.float16(alpha)).astype(np.float16),)


def node(operator: str, *names: str, domain: str = "", **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(operator, names[:-1], names[-1:], domain=domain, **attributes)


def model_of(
    nodes: Sequence[onnx.NodeProto], inputs: dict[str, Any], outputs: dict[str, int], described: dict[str, Any]
) -> onnx.ModelProto:
    kinds = {name: TensorProto.FLOAT if name == "bias" else HALF for name in inputs}
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info(name, kinds[name], array.shape) for name, array in inputs.items()],
        [helper.make_tensor_value_info(name, kind, None) for name, kind in outputs.items()],
        [numpy_helper.from_array(np.array([0, -1]), "flat")],
        value_info=[helper.make_tensor_value_info(name, HALF, dims) for name, dims in described.items()],
    )
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=9)
    shapes.infer(model, list(graph.value_info))
    return model


def check(nodes: Sequence[onnx.NodeProto], outputs: dict[str, int], counts: dict[str, int], **sizes: Any) -> None:
    """Check the number of nodes of each operator after that, and that the graph computes the same."""
    described = sizes.pop("described", {})
    random = np.random.default_rng(0)
    feeds = {
        name: random.normal(size=dims).astype(np.float32 if name == "bias" else np.float16)
        for name, dims in sizes.items()
    }
    model = model_of(nodes, feeds, outputs, described)
    mine = put_products(model, HALF)
    assert Counter(one.op_type for one in mine.graph.node) == counts
    expected = ReferenceEvaluator(model, new_ops=[FusedMatMul]).run(None, feeds)
    found = ReferenceEvaluator(mine, new_ops=[Product, FusedMatMul]).run(None, feeds)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.astype(np.float64), other, rtol=4e-3, atol=4e-2)


def test_a_linear_layer_with_its_bias() -> None:
    nodes = [
        node("MatMul", "x", "w", "p"),
        node("Cast", "p", "wide", to=TensorProto.FLOAT),
        node("Add", "bias", "wide", "sum"),
        node("Cast", "sum", "y", to=HALF),
        node("Identity", "y", "z"),
    ]
    check(nodes, {"z": HALF}, {"Product": 1, "Cast": 1, "Identity": 1}, x=(2, 3, 4), w=(4, 5), bias=(5,))


@pytest.mark.parametrize("rows", [1, 5])
def test_what_is_added_to_rows_is_not_a_bias(rows: int) -> None:
    nodes = [
        node("MatMul", "x", "w", "p"),
        node("Cast", "p", "wide", to=TensorProto.FLOAT),
        node("Add", "wide", "bias", "sum"),
        node("Cast", "sum", "y", to=HALF),
    ]
    check(nodes, {"y": HALF}, {"Product": 1, "Cast": 2, "Add": 1}, x=(5, 4), w=(4, 5), bias=(rows, 1))


def test_a_sum_that_is_read_in_fp32_stays() -> None:
    nodes = [
        node("MatMul", "x", "w", "p"),
        node("Cast", "p", "wide", to=TensorProto.FLOAT),
        node("Add", "wide", "bias", "sum"),
        node("Cast", "sum", "y", to=HALF),
    ]
    outputs = {"y": HALF, "sum": TensorProto.FLOAT}
    check(nodes, outputs, {"Product": 1, "Cast": 2, "Add": 1}, x=(3, 4), w=(4, 5), bias=(5,))


def test_the_gradient_of_a_weight_is_written_in_fp32_and_the_right_way_round() -> None:
    nodes = [
        node("Transpose", "x", "turned", perm=[1, 0]),
        node("MatMul", "turned", "dy", "back"),
        node("Transpose", "back", "half", perm=[1, 0]),
        node("Cast", "half", "w_grad", to=TensorProto.FLOAT),
    ]
    check(nodes, {"w_grad": TensorProto.FLOAT}, {"Product": 1}, x=(6, 4), dy=(6, 5))


def test_a_gradient_that_is_turned_twice_is_one_product() -> None:
    """Of a weight [out, in] with more inputs than outputs, as PyTorch's exporter writes it."""
    nodes = [
        node("Transpose", "dy", "turned", perm=[1, 0]),
        node("MatMul", "turned", "x", "once"),
        node("Transpose", "once", "twice", perm=[1, 0]),
        node("Transpose", "twice", "half", perm=[1, 0]),
        node("Cast", "half", "w_grad", to=TensorProto.FLOAT),
    ]
    check(nodes, {"w_grad": TensorProto.FLOAT}, {"Product": 1}, x=(6, 5), dy=(6, 4))


def test_turned_factors() -> None:
    nodes = [node("FusedMatMul", "x", "w", "y", domain="com.microsoft", transA=1, transB=1)]
    check(nodes, {"y": HALF}, {"Product": 1}, x=(4, 6), w=(5, 4), described={"y": (6, 5)})


@pytest.mark.parametrize(
    ("attributes", "x", "w"),
    [({"alpha": 0.5}, (6, 4), (4, 5)), ({"transBatchB": 1}, (6, 4), (4, 5))],
    ids=["scaled", "turned batches"],
)
def test_other_products_are_left_alone(attributes: dict[str, Any], x: tuple[int, ...], w: tuple[int, ...]) -> None:
    nodes = [node("FusedMatMul", "x", "w", "y", domain="com.microsoft", **attributes)]
    feeds = {name: np.zeros(dims, np.float16) for name, dims in (("x", x), ("w", w))}
    model = put_products(model_of(nodes, feeds, {"y": HALF}, {"y": (6, 5)}), HALF)
    assert [one.op_type for one in model.graph.node] == ["FusedMatMul"]


def test_batches_of_matrices_and_fp32_are_left_alone() -> None:
    check([node("MatMul", "x", "w", "y")], {"y": HALF}, {"MatMul": 1}, x=(2, 3, 4), w=(2, 4, 5))
    model = model_of([node("MatMul", "x", "w", "y")], {"x": np.zeros((3, 4)), "w": np.zeros((4, 5))}, {"y": HALF}, {})
    assert [one.op_type for one in put_products(model, TensorProto.BFLOAT16).graph.node] == ["MatMul"]


A, B, BIAS = (Tensor(1, dims, int(HALF)) for dims in ((2, 3, 4), (4, 5), (5,)))


def test_sizes_of_a_product() -> None:
    shape, dims = shape_of(A, B, BIAS, int(HALF), False, False)
    assert (shape.rows, shape.columns, shape.depth, shape.bias, dims) == (6, 5, 4, True, (2, 3, 5))
    turned, dims = shape_of(Tensor(1, (4, 6), int(HALF)), Tensor(1, (5, 4), int(HALF)), None, 1, True, True)
    assert (turned.rows, turned.columns, turned.depth, turned.bias, dims) == (6, 5, 4, False, (6, 5))


@pytest.mark.parametrize(
    ("a", "b", "bias", "result", "turn_a"),
    [
        (A, Tensor(1, (3, 5), int(HALF)), None, HALF, False), (A, B, Tensor(1, (4,), int(HALF)), HALF, False),
        (A, B, None, HALF, True), (A, Tensor(1, (4,), int(HALF)), None, HALF, False),
        (A, Tensor(1, (4, 5), int(TensorProto.BFLOAT16)), None, HALF, False), (A, B, None, TensorProto.BFLOAT16, False),
        (A, B, BIAS, TensorProto.FLOAT, False),
    ],
    ids=["depth", "bias", "turned batch", "vector", "types", "result", "bias of halves for fp32"],
)  # fmt: skip
def test_what_does_not_fit_is_refused(a: Tensor, b: Tensor, bias: Any, result: int, turn_a: bool) -> None:
    with pytest.raises(OrtflowError, match=r"product|bias"):
        shape_of(a, b, bias, int(result), turn_a, False)
