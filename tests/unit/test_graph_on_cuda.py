"""The graph as GPUs run it computes the same, on the CPU too."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ortflow.workflow.graph.ir import shapes
from ortflow.workflow.graph.optimize.on_cuda import on_cuda
from ortflow.workflow.onnx_runtime import onnxruntime

ROWS, WIDTH, TABLE = 500, 16, 7


def scatter(*, onto_zeros: bool, axis: int = 0, reduction: str = "add") -> onnx.ModelProto:
    nodes = [helper.make_node("ScatterElements", ["data", "places", "rows"], ["sum"], axis=axis, reduction=reduction)]
    inputs = [
        helper.make_tensor_value_info("places", TensorProto.INT64, ["n", WIDTH]),
        helper.make_tensor_value_info("rows", TensorProto.FLOAT, ["n", WIDTH]),
    ]
    constants = []
    if onto_zeros:
        constants.append(onnx.numpy_helper.from_array(np.array([TABLE, WIDTH]), "shape"))
        nodes.insert(0, helper.make_node("ConstantOfShape", ["shape"], ["data"]))
    else:
        inputs.append(helper.make_tensor_value_info("data", TensorProto.FLOAT, [TABLE, WIDTH]))
    outputs = [helper.make_tensor_value_info("sum", TensorProto.FLOAT, [TABLE, WIDTH])]
    graph = helper.make_graph(nodes, "scatter", inputs, outputs, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> np.ndarray:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (result,) = session.run(None, {value.name: feeds[value.name] for value in session.get_inputs()})
    return np.asarray(result)


def feeds(scale: float) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    rows = random.normal(size=(ROWS, WIDTH)) * scale * 10.0 ** random.integers(-4, 4, (ROWS, 1))
    return {
        "places": np.broadcast_to(random.integers(0, TABLE, (ROWS, 1)), (ROWS, WIDTH)).copy(),
        "rows": rows.astype(np.float32),
        "data": random.normal(size=(TABLE, WIDTH)).astype(np.float32),
    }


@pytest.mark.parametrize("onto_zeros", [True, False])
@pytest.mark.parametrize("scale", [1e-15, 1.0, 1e15])
def test_sums_by_integers_are_the_sums_in_any_order(onto_zeros: bool, scale: float) -> None:
    given = feeds(scale)
    model = on_cuda(scatter(onto_zeros=onto_zeros))
    found = run(model, given)
    exact = np.zeros((TABLE, WIDTH)) if onto_zeros else given["data"].astype(np.float64)
    np.add.at(exact, (given["places"], np.arange(WIDTH)), given["rows"].astype(np.float64))
    np.testing.assert_allclose(found, exact, rtol=3e-7, atol=3e-7 * float(np.abs(exact).max()))
    order = np.random.default_rng(1).permutation(ROWS)
    np.testing.assert_array_equal(
        found, run(model, {**given, "places": given["places"][order], "rows": given["rows"][order]})
    )


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_show(value: float) -> None:
    given = feeds(1.0)
    given["rows"][3, 4] = value
    assert np.isnan(run(on_cuda(scatter(onto_zeros=True)), given)).all()


def test_zeros_stay_zeros() -> None:
    given = feeds(0.0)
    assert not run(on_cuda(scatter(onto_zeros=True)), given).any()


def operators(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def test_what_does_not_race_stays() -> None:
    for model in (scatter(onto_zeros=False, reduction="none"), scatter(onto_zeros=False, reduction="max")):
        assert operators(on_cuda(model)) == ["ScatterElements"]
    model = scatter(onto_zeros=False, axis=1)
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 1
    model.graph.input[1].type.tensor_type.shape.dim[1].dim_value = 1
    assert operators(on_cuda(model)) == ["ScatterElements"], "one place along the axis"


def test_products_read_matrices_the_other_way_round() -> None:
    nodes = [
        helper.make_node("Transpose", ["x"], ["t"], perm=[1, 0]),
        helper.make_node("Reshape", ["t", "same"], ["r"]),
        helper.make_node("MatMul", ["r", "y"], ["z"]),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "xyz"]
    graph = helper.make_graph(
        nodes, "weights", values[:2], values[2:], [onnx.numpy_helper.from_array(np.array([0, -1]), "same")]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    made = on_cuda(model)
    assert operators(made) == ["Transpose", "MatMul"]
    x, y = np.ones((3, 2), np.float32), np.ones((3, 4), np.float32)
    np.testing.assert_array_equal(run(made, {"x": x, "y": y}), run(model, {"x": x, "y": y}))


def test_sums_over_rows_are_products() -> None:
    nodes = [
        helper.make_node("Mul", ["x", "x"], ["s"]),
        helper.make_node("ReduceSum", ["s", "last"], ["rows"], keepdims=1),
        helper.make_node("ReduceSum", ["s", "first"], ["columns"], keepdims=1),
        helper.make_node("ReduceSum", ["n", "last"], ["whole"], keepdims=1),
    ]
    graph = helper.make_graph(
        nodes,
        "sums",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["b", "h", 9]),
            helper.make_tensor_value_info("n", TensorProto.INT64, ["b", 9]),
        ],
        [
            *(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("rows", "columns")),
            helper.make_tensor_value_info("whole", TensorProto.INT64, None),
        ],
        [onnx.numpy_helper.from_array(np.array([axis]), name) for name, axis in (("last", -1), ("first", 0))],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    made = on_cuda(model)
    assert operators(made).count("MatMul") == 1
    assert operators(made).count("ReduceSum") == 2, "of another axis, and of integers"
    x = np.random.default_rng(0).normal(size=(2, 3, 9)).astype(np.float32)
    feeds = {"x": x, "n": np.arange(18).reshape(2, 9)}
    for one in (made, model):
        session = onnxruntime.InferenceSession(one.SerializeToString(), providers=["CPUExecutionProvider"])
        rows, _, whole = session.run(None, feeds)
        assert rows.shape == (2, 3, 1)
        np.testing.assert_allclose(rows, (x**2).sum(-1, keepdims=True), rtol=1e-6)
        np.testing.assert_array_equal(whole, [[36], [117]])


def counted(dims: list[str]) -> onnx.ModelProto:
    """A mean computed from the shape, and a size that passes through floating point."""
    scalar = dims == []
    nodes = [
        helper.make_node("Size", ["x"], ["size"]) if scalar else helper.make_node("Shape", ["x"], ["size"], end=1),
        helper.make_node("Sub", ["size", "one"], ["less"]),
        helper.make_node("Cast", ["size"], ["n"], to=TensorProto.FLOAT),
        helper.make_node("Cast", ["less"], ["m"], to=TensorProto.FLOAT),
        helper.make_node("Div", ["n", "m"], ["correction"]),
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        helper.make_node("Div", ["sum", "n"], ["mean"]),
        helper.make_node("Mul", ["mean", "correction"], ["corrected"]),
        helper.make_node("Shape", ["x"], ["rows"], end=1),
        helper.make_node("Cast", ["rows"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["f", "half"], ["g"]),
        helper.make_node("Cast", ["g"], ["wanted"], to=TensorProto.INT64),
        helper.make_node("Expand", ["corrected", "wanted"], ["out"]),
    ]
    constants = [
        onnx.numpy_helper.from_array(np.array(1 if scalar else [1]), "one"),
        onnx.numpy_helper.from_array(np.float32([0.5]), "half"),
    ]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", WIDTH])]
    outputs = [helper.make_tensor_value_info("out", TensorProto.FLOAT, ["k"])]
    graph = helper.make_graph(nodes, "counted", inputs, outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    shapes.infer(model, [])
    return model


@pytest.mark.parametrize("dims", [[], ["1"]], ids=["scalar", "one axis"])
def test_counts_that_meet_data_are_made_on_the_gpu_and_sizes_are_not(dims: list[str]) -> None:
    plain = counted(dims)
    moved = on_cuda(plain)
    lengths = [node for node in moved.graph.node if node.op_type == "ConstantOfShape"]
    casts = {node.output[0]: node.input[0] for node in moved.graph.node if node.op_type == "Cast"}
    assert len(lengths) == 1, "both counts are made of one length"
    assert all(node.output[0] != "less" for node in moved.graph.node), "nothing is computed twice"
    assert (casts["f"], casts["wanted"]) == ("rows", "g"), "a size is not moved"
    assert casts["n"] != "size"
    x = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
    np.testing.assert_array_equal(run(moved, {"x": x}), run(plain, {"x": x}))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("shape", [(6, 3), (4, 3, 5), (2, 3, 4, 5)])
def test_batch_normalization_in_training_is_written_out(shape: tuple[int, ...], momentum: float) -> None:
    """The CUDA provider has no kernel for it."""
    names = ["x", "scale", "bias", "mean", "variance"]
    node = helper.make_node(
        "BatchNormalization", names, ["y", "new_mean", "new_variance"], training_mode=1, momentum=momentum, epsilon=1e-3
    )
    sizes = [shape, *[shape[1:2]] * 4]
    graph = helper.make_graph(
        [node],
        "normalized",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, size) for name, size in zip(names, sizes, strict=True)],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in node.output],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    written = on_cuda(model)
    assert all(each.op_type != "BatchNormalization" for each in written.graph.node)
    random = np.random.default_rng(0)
    given = {name: random.random(size, np.float32) for name, size in zip(names, sizes, strict=True)}
    results = []
    for each in (model, written):
        session = onnxruntime.InferenceSession(each.SerializeToString(), providers=["CPUExecutionProvider"])
        results.append(session.run(None, {value.name: given[value.name] for value in session.get_inputs()}))
    for mine, theirs in zip(results[1], results[0], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=2e-6)


def deconvolution(**attributes: object) -> onnx.ModelProto:
    node = helper.make_node("ConvTranspose", ["x", "w", "b"], ["y"], **attributes)
    sizes = {"x": [2, 4, 6, 5], "w": [4, 3, 3, 4], "b": [6]}
    graph = helper.make_graph(
        [node],
        "deconvolution",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, size) for name, size in sizes.items()],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


@pytest.mark.parametrize("seed", range(40))
def test_transposed_convolutions_are_padded_evenly(seed: int) -> None:
    """The CUDA provider has no kernel for others: ONNX Runtime would run them on the CPU."""
    random = np.random.default_rng(seed)
    strides = random.integers(1, 4, 2)
    dilations = random.integers(1, 3, 2)
    attributes = {
        "strides": strides.tolist(),
        "dilations": dilations.tolist(),
        "output_padding": [int(random.integers(0, stride)) for stride in strides],
        "pads": random.integers(0, 3, 4).tolist(),
        "group": 2,
    }
    model = deconvolution(**attributes)
    made = on_cuda(model)
    (node,) = (node for node in made.graph.node if node.op_type == "ConvTranspose")
    pads = next(list(each.ints) for each in node.attribute if each.name == "pads")
    assert pads[:2] == pads[2:]
    given = {
        value.name: random.normal(size=[dim.dim_value for dim in value.type.tensor_type.shape.dim]).astype(np.float32)
        for value in model.graph.input
    }
    np.testing.assert_allclose(run(made, given), run(model, given), rtol=1e-5, atol=1e-5)


def test_the_gradient_of_a_convolution_of_stride_two_needs_no_cut() -> None:
    made = on_cuda(deconvolution(strides=[2, 2], pads=[1, 1, 0, 0], group=2))
    assert operators(made) == ["ConvTranspose"]
    assert "Slice" in operators(on_cuda(deconvolution(strides=[2, 2], pads=[0, 0, 1, 1], group=2)))


@pytest.mark.parametrize(
    ("axis", "sizes", "kind", "apart"),
    [
        (1, [1, 4, 2], TensorProto.FLOAT, True),
        (-1, [3, 1], TensorProto.FLOAT, True),
        (0, [1, 1], TensorProto.FLOAT, False),
        (0, [1, 3], TensorProto.INT64, False),
    ],
)
def test_parts_of_different_sizes_are_slices(axis: int, sizes: list[int], kind: int, apart: bool) -> None:
    """The CUDA provider's Split copies their sizes from the host, which a CUDA graph must not do again."""
    dims = [2, 3, 4]
    dims[axis] = sum(sizes)
    names = [f"y{place}" for place in range(len(sizes))]
    graph = helper.make_graph(
        [helper.make_node("Split", ["x", "sizes"], names, axis=axis)],
        "split",
        [helper.make_tensor_value_info("x", kind, dims)],
        [helper.make_tensor_value_info(name, kind, None) for name in names],
        [numpy_helper.from_array(np.array(sizes), "sizes")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    made = on_cuda(model)
    assert {node.op_type for node in made.graph.node} - {"Identity"} == ({"Slice"} if apart else {"Split"})
    x = np.random.default_rng(0).normal(size=dims) * 100
    given = {"x": x.astype(np.float32 if kind == TensorProto.FLOAT else np.int64)}
    sessions = [
        onnxruntime.InferenceSession(each.SerializeToString(), providers=["CPUExecutionProvider"])
        for each in (made, model)
    ]
    for mine, theirs in zip(*(session.run(names, given) for session in sessions), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("count", [32, 33, 65, 1025])
def test_a_concat_of_many_values_is_made_in_parts(count: int) -> None:
    """The CUDA provider accepts 32 while a CUDA graph is captured."""
    names = [f"x{number}" for number in range(count)]
    graph = helper.make_graph(
        [helper.make_node("Concat", names, ["y"], axis=-1)],
        "joined",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 1]) for name in names],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    made = on_cuda(model)
    joins = [node for node in made.graph.node if node.op_type == "Concat"]
    assert max(len(node.input) for node in joins) <= 32
    assert (len(joins) == 1) == (count <= 32)
    given = {name: np.full((2, 1), number, np.float32) for number, name in enumerate(names)}
    np.testing.assert_array_equal(run(made, given), run(model, given))


def test_inputs_that_nothing_reads_go() -> None:
    """ONNX Runtime would copy them to the host at each run, which no CUDA graph can contain."""
    model = deconvolution(strides=[2, 2], pads=[1, 1, 0, 0], group=2)
    model.graph.input.append(helper.make_tensor_value_info("unread", TensorProto.FLOAT, [3]))
    model.graph.input.append(helper.make_tensor_value_info("passed on", TensorProto.FLOAT, [3]))
    model.graph.output.append(helper.make_tensor_value_info("passed on", TensorProto.FLOAT, [3]))
    assert [value.name for value in on_cuda(model).graph.input] == ["x", "w", "b", "passed on"]


def test_no_cpu_node_reads_a_size() -> None:
    """It would wait for the GPU, which no captured graph may."""
    nodes = [
        helper.make_node("Size", ["x"], ["size"]),
        helper.make_node("Reshape", ["size", "one"], ["length"]),
        helper.make_node("ConstantOfShape", ["length"], ["zeros"]),
        helper.make_node("Reshape", ["x", "all"], ["flat"]),
        helper.make_node("ScatterElements", ["zeros", "places", "flat"], ["y"], axis=0),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3])
    places = helper.make_tensor_value_info("places", TensorProto.INT64, ["m"])
    constants = [numpy_helper.from_array(np.array([value]), name) for name, value in (("one", 1), ("all", -1))]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["m"])]
    graph = helper.make_graph(nodes, "scatter", [x, places], outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    given = {"x": np.arange(12, dtype=np.float32).reshape(4, 3), "places": np.arange(12)[::-1].copy()}
    found = on_cuda(model)
    assert "Size" in {node.op_type for node in model.graph.node}
    assert "Size" not in {node.op_type for node in found.graph.node}
    onnx.checker.check_model(found)
    np.testing.assert_array_equal(run(found, given), run(model, given))
