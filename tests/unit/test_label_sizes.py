"""Exported models whose outputs read a label only for its sizes."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.export.inference import infer_graph
from ortflow.workflow.onnx_runtime import onnxruntime


def model_of(dims: list[int | str | None], *, cast: bool = False, **between: int) -> onnx.ModelProto:
    """A query expanded to the batch, whose size is read from the labels, and added to x."""
    read = "as_floats" if cast else "labels"
    nodes = [
        *([helper.make_node("Cast", ["labels"], ["as_floats"], "/cast", to=TensorProto.FLOAT)] if cast else []),
        helper.make_node("Shape", [read], ["sizes"], "/shape", **between),
        helper.make_node("Gather", ["sizes", "first"], ["batch"], "/first"),
        helper.make_node("Concat", ["batch", "width"], ["whole"], "/whole", axis=0),
        helper.make_node("Expand", ["query", "whole"], ["queries"], "/expand"),
        helper.make_node("Add", ["x", "queries"], ["y"], "/add"),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [
            helper.make_tensor_value_info("labels", TensorProto.INT64, dims),
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 3])],
        [
            numpy_helper.from_array(np.array([0]), "first"),
            numpy_helper.from_array(np.array([3]), "width"),
            numpy_helper.from_array(np.ones((1, 3), np.float32), "query"),
        ],
    )
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)])


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize(("dims", "between"), [(["batch"], {}), (["batch", 7], {}), ([5, "batch"], {"start": 1})])
def test_the_batch_s_size_is_read_from_another_input(
    dims: list[int | str | None], between: dict[str, int], cast: bool
) -> None:
    model = infer_graph(model_of(dims, cast=cast, **between), ["labels"])
    assert [value.name for value in model.graph.input] == ["x"]
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    for rows in (1, 4):
        (found,) = session.run(None, {"x": np.zeros((rows, 3), np.float32)})
        np.testing.assert_array_equal(found, np.ones((rows, 3)))


@pytest.mark.parametrize("dims", [["objects"], [None], ["batch", "objects"]], ids=str)
def test_a_size_of_the_label_alone_still_depends_on_it(dims: list[int | str | None]) -> None:
    with pytest.raises(UserError, match="every output of the model depends on its labels"):
        infer_graph(model_of(dims), ["labels"])
