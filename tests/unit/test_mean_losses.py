"""Means of cross-entropies as a sum and a count: the same loss and gradient, and which nodes become one."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import ortflow
from ortflow.workflow.graph.optimize.mean_losses import divide_means
from ortflow.workflow.onnx_runtime import onnxruntime

ROWS, CLASSES = 5, 7


def model(*outputs: str, weights: bool = False, **attributes: Any) -> onnx.ModelProto:
    info = helper.make_tensor_value_info
    given = [info("x", TensorProto.FLOAT, [ROWS, CLASSES]), info("labels", TensorProto.INT64, [ROWS])]
    if weights:
        given.append(info("w", TensorProto.FLOAT, [CLASSES]))
    node = helper.make_node("SoftmaxCrossEntropyLoss", [v.name for v in given], outputs, "loss", **attributes)
    made = [info("loss", TensorProto.FLOAT, []), info("p", TensorProto.FLOAT, [ROWS, CLASSES])][: len(outputs)]
    graph = helper.make_graph([node], "graph", given, made)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def divided(before: onnx.ModelProto) -> onnx.ModelProto:
    after = onnx.ModelProto()
    after.CopyFrom(before)
    divide_means(after.graph)
    return after


def results(of: onnx.ModelProto, labels: list[int]) -> list[np.ndarray]:
    both = ortflow.grad(of, "loss", "x")
    session = onnxruntime.InferenceSession(both.SerializeToString(), providers=["CPUExecutionProvider"])
    x = np.random.default_rng(1).standard_normal((ROWS, CLASSES)).astype(np.float32)
    found: list[np.ndarray] = session.run(None, {"x": x, "labels": np.array(labels, np.int64)})
    return found


@pytest.mark.parametrize("outputs", [("loss",), ("loss", "p")])
@pytest.mark.parametrize("attributes", [{}, {"reduction": "mean", "ignore_index": -100}, {"ignore_index": 3}])
def test_the_same_numbers(outputs: tuple[str, ...], attributes: dict[str, Any]) -> None:
    before = model(*outputs, **attributes)
    after = divided(before)
    onnx.checker.check_model(after, full_check=True)
    assert helper.get_node_attr_value(after.graph.node[0], "reduction") == b"sum"
    skipped = attributes.get("ignore_index", 0)
    for expected, actual in zip(*(results(each, [1, skipped, 3, 6, 3]) for each in (before, after)), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-7)


def test_no_rows_are_not_a_number() -> None:
    loss, _ = results(divided(model("loss", ignore_index=3)), [3] * ROWS)
    assert np.isnan(loss)


@pytest.mark.parametrize("other", [{"reduction": "sum"}, {"reduction": "none"}, {"weights": True}])
def test_other_losses_stay(other: dict[str, Any]) -> None:
    before = model("loss", **other)
    assert divided(before) == before
