"""EmbeddingBag as TorchScript writes it, a Loop over the bags, against numpy in double precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graph_build_models import built, run_graph, save_model, tensors_of, value
from onnx import TensorProto, helper, numpy_helper

RNG = np.random.default_rng(0)
ROWS, WIDTH, BAG = 7, 3, 4


def looped(path: Path, reduction: str, *, weighted: bool) -> Path:
    """Bags of the rows of x; the first index of each is left out of its bag, and the third row's bag is empty."""

    def node(op: str, *inputs: str, output: str, **attributes: Any) -> onnx.NodeProto:
        return helper.make_node(op, inputs, [output], f"{op}-{output}", **attributes)

    rows = [node("Gather", "table", "part", output="rows")]
    if weighted:
        rows += [
            node("Slice", "factors", "start", "end", "zero", output="some"),
            node("Unsqueeze", "some", "one", output="column"),
            node("Mul", "rows", "column", output="scaled"),
        ]
    body = helper.make_graph(
        [
            node("Gather", "starts", "i", output="s"),
            node("Gather", "ends", "i", output="e"),
            node("Constant", output="first", value=numpy_helper.from_array(np.array([0]))),
            node("Unsqueeze", "s", "first", output="start"),
            node("Unsqueeze", "e", "first", output="end"),
            node("Slice", "flat", "start", "end", "zero", output="part"),
            *rows,
            node(reduction, "scaled" if weighted else "rows", "first", output="bag", keepdims=0),
            node("Identity", "condition", output="again"),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("condition", TensorProto.BOOL, []),
        ],
        [
            helper.make_tensor_value_info("again", TensorProto.BOOL, []),
            helper.make_tensor_value_info("bag", TensorProto.FLOAT, [WIDTH]),
        ],
    )
    nodes = [
        node("Reshape", "x", "all", output="flat"),
        node("Shape", "flat", output="length"),
        node("Squeeze", "length", output="count"),
        node("Shape", "x", output="shape"),
        node("Gather", "shape", "place", output="bags"),
        node("Range", "none", "count", "width", output="firsts"),
        node("Concat", "firsts", "length", axis=0, output="borders"),
        node("Slice", "borders", "one", "many", output="ends"),
        node("Add", "borders", "skipped", output="starts"),
        node("ReduceSum", "factor", output="unused"),
        node("Expand", "factor", "length", output="factors"),
        helper.make_node("Loop", ["bags", "yes"], ["y"], "loop", body=body),
    ]
    tensors = {
        "table": RNG.normal(size=(ROWS, WIDTH)).astype("float32"),
        "factor": np.array([0.7], "float32"),
        "yes": np.array(True),
    }
    integers = {
        "all": [-1],
        "place": 0,
        "none": 0,
        "width": BAG,
        "one": [1],
        "zero": [0],
        "many": [2**62],
        "skipped": 1,
    }
    tensors |= {name: np.array(number) for name, number in integers.items()}
    return save_model(path, nodes, [value("x", ["batch", BAG], "int64")], [value("y", ["batch", WIDTH])], tensors)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["ReduceSum", "ReduceMean", "ReduceMax"])
def test_gradient_of_the_table(tmp_path: Path, reduction: str, weighted: bool) -> None:
    path = looped(tmp_path / "m.onnx", reduction, weighted=weighted)
    graphs = built(path, {"kind": "mse"}, model__parameters__train=["table"])
    assert "1 EmbeddingBag written without its loop" in graphs.notes
    assert graphs.vocabulary == {"x": ROWS}
    tensors = tensors_of(graphs)
    x = RNG.integers(0, ROWS, (5, BAG))
    labels = RNG.normal(size=(5, WIDTH)).astype("float32")

    factor = 0.7 if weighted else 1.0
    rows = tensors["table"].astype("float64")[x[:, 1:]] * factor
    share = np.full(rows.shape, 1.0)
    if reduction == "ReduceMean":
        share /= BAG - 1
    if reduction == "ReduceMax":
        share = (rows == rows.max(1, keepdims=True)) * 1.0
        # Equal rows each contribute, and all are one row of the table.
        share /= share.sum(1, keepdims=True)
    y = (rows * share).sum(1)
    expected = np.zeros((ROWS, WIDTH))
    np.add.at(expected, x[:, 1:], 2 * (y - labels)[:, None] * share * factor)

    train = run_graph(graphs.train, {"x": x, "labels": labels, **tensors})
    assert train["ortflow.loss_sum"] == pytest.approx(((y - labels) ** 2).sum(), rel=1e-5)
    np.testing.assert_allclose(train["table_grad"], expected, rtol=1e-5, atol=1e-5)
