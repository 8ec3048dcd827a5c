"""What `prepare` folds: shapes within a graph, and pooling windows as the standard counts them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.autodiff.compose import compose
from ortflow.workflow.graph.autodiff.reverse import differentiate
from ortflow.workflow.graph.normalize.prepare import prepare
from ortflow.workflow.onnx_runtime import onnxruntime as ort

RNG = np.random.default_rng(0)
TIME, WIDTH = 5, 3
RELEASE = tuple(int(part) for part in ort.__version__.split(".")[:2])


def node(op: str, *inputs: str, output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs, [output], f"{op.lower()}-{output}", **attributes)


def model(
    nodes: Sequence[onnx.NodeProto], kind: int, shape: Sequence[int | str], **initializers: np.ndarray
) -> onnx.ModelProto:
    """A graph from x to y."""
    graph = helper.make_graph(
        nodes,
        "test",
        [helper.make_tensor_value_info("x", kind, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        initializer=[numpy_helper.from_array(array, name) for name, array in initializers.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def run(graph: onnx.ModelProto, outputs: list[str], **inputs: np.ndarray) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = ort.InferenceSession(graph.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(outputs, inputs)


def integer(value: int | list[int]) -> np.ndarray:
    return np.array(value, np.int64)


@cache
def positions() -> onnx.ModelProto:
    """Token and position embeddings as TorchScript writes them: the positions are cut to the length of the tokens."""
    return model(
        [
            node("Shape", "x", output="shape"),
            node("Gather", "shape", "one", output="time"),
            node("Unsqueeze", "time", "zero_axis", output="end"),
            node("Unsqueeze", "zero", "zero_axis", output="start"),
            node("Unsqueeze", "one", "zero_axis", output="axis"),
            node("Slice", "range", "start", "end", "axis", "axis", output="places"),
            node("Gather", "table", "x", output="tokens"),
            node("Gather", "position", "places", output="positions"),
            node("Add", "tokens", "positions", output="y"),
        ],
        TensorProto.INT64,
        ["batch", TIME],
        zero=integer(0),
        one=integer(1),
        zero_axis=integer([0]),
        range=np.arange(8, dtype=np.int64)[None],
        table=RNG.normal(size=(7, WIDTH)).astype(np.float32),
        position=RNG.normal(size=(8, WIDTH)).astype(np.float32),
    )


def position_gradient(x: np.ndarray) -> np.ndarray:
    """Gradient of the sum of squares, of the prepared graph."""
    ready, _ = prepare(positions())
    graph = ready.graph
    graph.node.extend([node("Mul", "y", "y", output="square"), node("ReduceSum", "square", output="loss", keepdims=0)])
    del graph.output[:]
    graph.output.append(helper.make_tensor_value_info("loss", TensorProto.FLOAT, []))
    weights = {t.name: numpy_helper.to_array(t) for t in graph.initializer if t.name in ("table", "position")}
    kept = [t for t in graph.initializer if t.name not in weights]
    copies = [onnx.TensorProto.FromString(t.SerializeToString()) for t in kept]
    del graph.initializer[:]
    graph.initializer.extend(copies)
    for name, values in weights.items():
        graph.input.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, values.shape))
    training, _ = differentiate(ready, list(weights), "loss")
    return run(compose(training), ["position_grad"], x=x, **weights)[0]


def test_broadcast_position_embeddings_have_the_right_gradient() -> None:
    x = RNG.integers(0, 7, (3, TIME))
    (y,) = run(positions(), ["y"], x=x)
    expected = np.zeros((8, WIDTH), np.float32)
    expected[:TIME] = 2 * y.sum(0)
    np.testing.assert_allclose(position_gradient(x), expected, rtol=1e-5)


def test_only_integers_are_folded_and_outputs_stay() -> None:
    nodes = [
        node("Shape", "x", output="shape"),
        node("Cast", "shape", output="float", to=TensorProto.FLOAT),
        node("Sqrt", "four", output="root"),
        node("Mul", "x", "root", output="scaled"),
        node("ReduceSum", "float", output="size", keepdims=0),
        node("Mul", "scaled", "size", output="y"),
    ]
    ready, _ = prepare(model(nodes, TensorProto.FLOAT, [2, 3], four=np.array([4, 4, 4], np.float32)))
    assert [n.op_type for n in ready.graph.node] == ["Cast", "Sqrt", "Mul", "ReduceSum", "Mul"]
    shape = next(t for t in ready.graph.initializer if t.name == "shape")
    assert numpy_helper.to_array(shape).tolist() == [2, 3]
    x = np.ones((2, 3), np.float32)
    np.testing.assert_array_equal(run(ready, ["y"], x=x)[0], 10 * x)


def test_what_varies_stays() -> None:
    nodes = [node("Shape", "x", output="shape"), node("Cast", "shape", output="y", to=TensorProto.FLOAT)]
    ready, _ = prepare(model(nodes, TensorProto.FLOAT, ["batch", 3]))
    assert [n.op_type for n in ready.graph.node] == ["Shape", "Cast"]


@pytest.mark.parametrize(
    "large",
    [
        [node("Range", "zero", "many", "one", output="r")],
        [node("ConstantOfShape", "many_axis", output="r", value=numpy_helper.from_array(integer([0])))],
        [node("Expand", "one", "many_axis", output="r")],
        [node("Tile", "pair", "many_axis", output="r")],
    ],
    ids=lambda nodes: nodes[0].op_type,
)
def test_nothing_large_is_made(large: list[onnx.NodeProto]) -> None:
    nodes = [
        *large,
        node("ReduceMax", "r", output="top", keepdims=0),
        node("Cast", "top", output="float", to=TensorProto.FLOAT),
        node("Mul", "x", "float", output="y"),
    ]
    numbers = {"zero": integer(0), "one": integer(1), "many": integer(10**11), "many_axis": integer([10**11])}
    start = time.process_time()
    with pytest.raises(UserError, match=rf"{large[0].op_type}.* makes a value of .* GiB from constants"):
        prepare(model(nodes, TensorProto.FLOAT, ["batch"], pair=integer([1, 2]), **numbers))
    assert time.process_time() - start < 2


def averages(x: np.ndarray, kernel: int, stride: int, pad: int) -> np.ndarray:
    """Average pooling that rounds up: a window counts its elements and its padding, and nothing beyond."""
    for axis in (2, 3):
        x = np.moveaxis(x, axis, 0)
        end = len(x) + pad
        starts = range(-pad, -pad + stride * (-(-(len(x) + 2 * pad - kernel) // stride) + 1), stride)
        windows = [(x[max(s, 0) : s + kernel].sum(0), min(s + kernel, end) - s) for s in starts]
        x = np.moveaxis(np.stack([total / count for total, count in windows]), 0, axis)
    return x


@pytest.mark.parametrize(("kernel", "stride", "pad"), [*itertools.product((2, 3), (1, 2), (0, 1))])
def test_average_pool_that_rounds_up_counts_no_more_than_its_padding(kernel: int, stride: int, pad: int) -> None:
    x = RNG.normal(size=(2, 3, 5, 8)).astype(np.float32)
    sizes = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [pad] * 4}
    pool = node("AveragePool", "x", output="y", ceil_mode=1, count_include_pad=1, **sizes)
    ready, _ = prepare(model([pool], TensorProto.FLOAT, ["batch", 3, 5, 8]))
    expected = averages(x, kernel, stride, pad)
    (found,) = run(ready, ["y"], x=x)
    if RELEASE >= (1, 20):
        # Newer ones, like PyTorch, omit a window that would start in the padding after the data.
        expected = expected[:, :, : found.shape[2], : found.shape[3]]
    np.testing.assert_allclose(found, expected, atol=1e-6)


def resized(places: str, shape: Sequence[int | str], **attributes: Any) -> onnx.ModelProto:
    """A Resize whose scales are computed as TorchScript writes them without folding constants."""
    nodes = {
        "sizes": [
            node("Shape", "x", output="shape"),
            node("Slice", "shape", "zero", "two", "zero", output="outer"),
            node("Cast", "inner", to=TensorProto.INT64, output="whole"),
            node("Concat", "outer", "whole", axis=0, output="amounts"),
            node("Resize", "x", "", "", "amounts", output="y", **attributes),
        ],
        "scales": [
            node("Concat", "one", "one", "scale", "scale", axis=0, output="amounts"),
            node("Resize", "x", "", "amounts", output="y", **attributes),
        ],
        "grown": [
            node("Shape", "x", output="shape"),
            node("Slice", "shape", "zero", "two", "zero", output="outer"),
            node("Slice", "shape", "two", "four", "zero", output="sizes"),
            node("Cast", "sizes", to=TensorProto.FLOAT, output="numbers"),
            node("Mul", "numbers", "scale", output="more"),
            node("Floor", "more", output="floor"),
            node("Cast", "floor", to=TensorProto.INT64, output="whole"),
            node("Concat", "outer", "whole", axis=0, output="amounts"),
            node("Resize", "x", "", "", "amounts", output="y", **attributes),
        ],
    }
    return model(
        nodes[places],
        TensorProto.FLOAT,
        shape,
        zero=integer([0]),
        two=integer([2]),
        four=integer([4]),
        inner=np.array([7, 9], np.int32),
        one=np.ones(1, np.float32),
        scale=np.array([1.75], np.float32),
    )


@pytest.mark.parametrize("shape", [["batch", 3, 4, 5], ["n", "c", 4, 5], ["n", "c", "h", "w"]])
@pytest.mark.parametrize("places", ["sizes", "scales", "grown"])
def test_resize_names_only_the_axes_it_changes(places: str, shape: Sequence[int | str]) -> None:
    whole = resized(places, shape, mode="linear", coordinate_transformation_mode="pytorch_half_pixel")
    ready, _ = prepare(whole)
    (changed,) = [n for n in ready.graph.node if n.op_type == "Resize"]
    axes = [a.ints for a in changed.attribute if a.name == "axes"]
    constants = {t.name: numpy_helper.to_array(t) for t in ready.graph.initializer}
    if places == "scales":
        assert axes == []
        np.testing.assert_array_equal(constants[changed.input[2]], [1, 1, 1.75, 1.75])
    else:
        assert axes == [[2, 3]]
        if places == "sizes" or shape[2] == 4:
            assert constants[changed.input[3]].tolist() == [7, 9 if places == "sizes" else 8]
    x = RNG.normal(size=(2, 3, 4, 5)).astype(np.float32)
    np.testing.assert_array_equal(run(ready, ["y"], x=x)[0], run(whole, ["y"], x=x)[0])


def test_integers_made_of_a_weight_are_not_folded() -> None:
    """The weight changes while the model trains, and with it the comparison."""
    kept = model(
        [
            node("Greater", "weight", "limit", output="above"),
            node("Cast", "above", to=TensorProto.FLOAT, output="mask"),
            node("Mul", "weight", "mask", output="sparse"),
            node("Add", "x", "sparse", output="y"),
        ],
        TensorProto.FLOAT,
        ["batch", 2],
        weight=np.array([1.0, -1.0], np.float32),
        limit=np.array(0.0, np.float32),
    )
    ready, _ = prepare(kept)
    assert [n.op_type for n in ready.graph.node] == [n.op_type for n in kept.graph.node]


@pytest.mark.parametrize("size", [4, 1, "height"])
def test_if_with_a_known_condition_is_its_branch(size: int | str) -> None:
    """As TorchScript writes a squeeze; the branches use one name for different values, and read values around them."""

    def branch(name: str, nodes: list[onnx.NodeProto], result: str) -> onnx.GraphProto:
        output = helper.make_tensor_value_info(result, TensorProto.FLOAT, None)
        return helper.make_graph(nodes, name, [], [output], [numpy_helper.from_array(integer([1]), "axis")])

    graph = model(
        [
            node("Shape", "x", start=1, end=2, output="height"),
            node("Equal", "height", "one", output="single"),
            helper.make_node(
                "If",
                ["single"],
                ["chosen"],
                "if",
                then_branch=branch("then", [node("Squeeze", "x", "axis", output="inner")], "inner"),
                else_branch=branch(
                    "else",
                    [node("ReduceSum", "x", "axis", keepdims=0, output="inner"), node("Neg", "inner", output="outer")],
                    "outer",
                ),
            ),
            node("Mul", "chosen", "scale", output="y"),
        ],
        TensorProto.FLOAT,
        ["batch", size, 3],
        one=integer([1]),
        scale=np.array([0.5], np.float32),
    )
    ready, _ = prepare(graph)
    kinds = [n.op_type for n in ready.graph.node]
    assert kinds[-2:] == {4: ["Neg", "Mul"], 1: ["Squeeze", "Mul"], "height": ["If", "Mul"]}[size]
    for height in [size] if isinstance(size, int) else [1, 4]:
        x = RNG.normal(size=(2, height, 3)).astype(np.float32)
        expected = 0.5 * (x[:, 0] if height == 1 else -x.sum(1))
        np.testing.assert_allclose(run(ready, ["y"], x=x)[0], expected, rtol=1e-6, atol=1e-6)
