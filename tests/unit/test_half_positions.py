"""Sampling positions in half precision: the products that compute them stay in fp32, the others do not."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from test_half import kinds, model_of, node, run

from ortflow.workflow.fusion.half import half
from ortflow.workflow.graph.autodiff.compose import compose
from ortflow.workflow.graph.autodiff.expand import make_differentiable
from ortflow.workflow.graph.autodiff.reverse import differentiate
from ortflow.workflow.graph.normalize.prepare import prepare

BATCH, WIDTH, SIDE = 4, 32, 64
TRAINED = ["w", "place", "image"]


PRODUCTS = {
    "product": [node("MatMul", "base", "columns", "moved")],
    "sum": [  # as PyTorch exports affine_grid
        node("Unsqueeze", "base", "last", "base_column"),
        node("Unsqueeze", "columns", "second", "columns_row"),
        node("Mul", "base_column", "columns_row", "terms"),
        node("ReduceSum", "terms", "third", "moved", keepdims=0),
    ],
}


def spatial_transformer(product: str) -> onnx.ModelProto:
    """Features, six numbers of an affine map, positions, samples."""
    nodes = [
        node("MatMul", "x", "w", "h"),
        node("Relu", "h", "features"),
        node("MatMul", "features", "place", "numbers"),
        node("Reshape", "numbers", "two_by_three", "map"),
        node("Transpose", "map", "columns", perm=[0, 2, 1]),
        *PRODUCTS[product],
        node("Add", "moved", "base_positions", "placed"),
        node("Reshape", "placed", "grid_dims", "grid"),
        node("GridSample", "image", "grid", "y", mode="bilinear", padding_mode="reflection"),
        node("Mul", "y", "y", "squares"),
        node("ReduceSum", "squares", "loss", keepdims=0),
    ]
    sizes = {"x": [BATCH, WIDTH], "w": [WIDTH, WIDTH], "place": [WIDTH, 6], "image": [BATCH, 1, SIDE, SIDE]}
    model = model_of(nodes, sizes, ["loss"])
    line = (np.arange(SIDE, dtype=np.float32) * 2 + 1) / SIDE - 1
    rows, columns = np.meshgrid(line, line, indexing="ij")
    base = np.stack([columns, rows, np.ones_like(rows)], -1).reshape(1, SIDE * SIDE, 3)
    constants = {
        "two_by_three": np.array([BATCH, 2, 3]), "grid_dims": np.array([BATCH, SIDE, SIDE, 2]),
        "base": base, "base_positions": base[..., :2],
        "last": np.array([3]), "second": np.array([1]), "third": np.array([2]),
    }  # fmt: skip
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in constants.items())
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("loss", TensorProto.FLOAT, []))
    del model.graph.value_info[:]
    return model


@pytest.mark.parametrize("product", PRODUCTS)
def test_positions_are_not_rounded(product: str) -> None:
    ready, _ = make_differentiable(prepare(spatial_transformer(product))[0], TRAINED, "loss")
    single = compose(differentiate(ready, TRAINED, "loss")[0])
    halved = half(single, TensorProto.FLOAT16, TRAINED, {})
    products = {one.output[0]: types for one, types in zip(products_of(halved), kinds(halved, "MatMul"), strict=True)}
    assert products["numbers"][1] == [TensorProto.FLOAT]
    assert product == "sum" or products["moved"][1] == [TensorProto.FLOAT]
    assert products["h.half"][1] == [TensorProto.FLOAT16], "features are no positions"
    random = np.random.default_rng(0)
    feeds = {
        "x": random.normal(size=(BATCH, WIDTH)), "w": random.normal(size=(WIDTH, WIDTH)) / WIDTH**0.5,
        "place": random.normal(size=(WIDTH, 6)) * 0.01, "image": random.normal(size=(BATCH, 1, SIDE, SIDE)),
    }  # fmt: skip
    exact, rounded = (run(model, {k: v.astype(np.float32) for k, v in feeds.items()}) for model in (single, halved))
    # The image is noise: a sample's derivative changes from pixel to pixel, and so with the features' rounding.
    for name, limit in (("loss", 1e-3), *((key, 0.05) for key in exact if key != "loss")):
        apart = np.linalg.norm(rounded[name] - exact[name]) / np.linalg.norm(exact[name])
        assert apart < limit, (name, apart)


def products_of(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [one for one in model.graph.node if one.op_type == "MatMul"]
