"""The faster forms against double precision, and against the graph without them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx
import pytest
from graph_build_models import Array, run_graph, value
from onnx import helper, numpy_helper

from ortflow.workflow.graph.autodiff.compose import compose
from ortflow.workflow.graph.autodiff.reverse import differentiate
from ortflow.workflow.graph.optimize import gelu, rewrites

RNG = np.random.default_rng(9)
SLOPE = math.sqrt(2 / math.pi)
CONSTANTS = {
    "one": 1.0, "half": 0.5, "root2": math.sqrt(2), "root_half": math.sqrt(0.5), "cube": 0.044715, "slope": SLOPE,
    "three": 3.0, "two": 2.0, "slope_cube": SLOPE * 0.044715, "odd": 0.0447,
}  # fmt: skip

# Each as lines of `result = Operator a b`, as exporters write them.
EXACT = {
    "torchscript": "d = Div x root2; e = Erf d; a = Add e one; m = Mul x a; y = Mul m half",
    "dynamo": "d = Mul x root_half; e = Erf d; a = Add one e; h = Mul half x; y = Mul h a",
    "onnx": "d = Div x root2; e = Erf d; a = Add e one; h = Mul half a; y = Mul x h",
}
TANH = {
    "transformers": "c = Pow x three; k = Mul c cube; s = Add x k; u = Mul slope s; t = Tanh u;"
    "a = Add t one; h = Mul x half; y = Mul h a",
    "by squares": "q = Mul x x; k = Mul q cube; o = Add one k; v = Mul x slope; u = Mul v o; t = Tanh u;"
    "a = Add one t; h = Mul half x; y = Mul h a",
    "by products": "q = Mul x x; c = Mul q x; k = Mul slope_cube c; v = Mul slope x; u = Add v k; t = Tanh u;"
    "a = Add t one; p = Mul a half; y = Mul p x",
}
NEITHER = {
    "another cube": "c = Pow x three; k = Mul c odd; s = Add x k; u = Mul slope s; t = Tanh u;"
    "a = Add t one; h = Mul x half; y = Mul h a",
    "no half": "d = Div x root2; e = Erf d; a = Add e one; y = Mul x a",
    "another x": "z = Mul x two; d = Div x root2; e = Erf d; a = Add e one; m = Mul z a; y = Mul m half",
}


def model(lines: str) -> onnx.ModelProto:
    """loss = sum(g * formula(x + b)): the formula's argument is itself a sum, as after a linear layer."""
    nodes = [helper.make_node("Add", ["input", "bias"], ["x"])]
    for place, line in enumerate(lines.split(";")):
        result, operator, *inputs = line.replace("=", " ").split()
        nodes.append(helper.make_node(operator, inputs, [result], name=f"/{place}"))
    nodes.append(helper.make_node("Mul", ["y", "g"], ["weighted"]))
    nodes.append(helper.make_node("ReduceSum", ["weighted"], ["loss"], keepdims=0))
    inputs = [value("input", [64, 32]), value("bias", [32]), value("g", [64, 32])]
    constants = [numpy_helper.from_array(np.float32(number), name) for name, number in CONSTANTS.items()]
    graph = helper.make_graph(nodes, "formula", inputs, [value("loss", [])], constants)
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=9)


def differentiated(forward: onnx.ModelProto, parameters: list[str], path: Path, *, fast: bool) -> onnx.GraphProto:
    if fast:
        rewrites.before(forward.graph)
    made, _ = differentiate(forward, parameters, "loss")
    if fast:
        rewrites.after(made.graph)
    made = compose(made)
    onnx.save(made, path)
    return made.graph


@pytest.mark.parametrize("name", [*EXACT, *TANH])
def test_gelu(name: str, tmp_path: Path) -> None:
    exact = name in EXACT
    forward = model({**EXACT, **TANH}[name])
    gelu.fuse(forward.graph)
    operators = [node.op_type for node in forward.graph.node]
    assert operators == ["Add", "Gelu" if exact else "FastGelu", "Mul", "ReduceSum"]

    graph = differentiated(model({**EXACT, **TANH}[name]), ["input"], tmp_path / "m.onnx", fast=True)
    assert not {"Gelu", "FastGelu", "GeluGrad", "FastGeluGrad"} & {node.op_type for node in graph.node}
    x = np.concatenate([np.linspace(-30, 30, 1024), RNG.normal(size=1024)]).reshape(64, 32).astype("float32")
    g, bias = RNG.normal(size=x.shape).astype("float32"), RNG.normal(size=32).astype("float32")
    outputs = run_graph(tmp_path / "m.onnx", {"input": x, "bias": bias, "g": g})
    wide = (x + bias).astype("float64")
    if exact:
        below = np.vectorize(math.erf)(wide / math.sqrt(2)) / 2 + 0.5
        slope = below + wide * np.exp(-(wide**2) / 2) / math.sqrt(2 * math.pi)
    else:
        t = np.tanh(SLOPE * (wide + 0.044715 * wide**3))
        below = (1 + t) / 2
        slope = below + wide / 2 * (1 - t**2) * SLOPE * (1 + 3 * 0.044715 * wide**2)
    assert outputs["loss"] == pytest.approx((wide * below * g).sum(), rel=1e-5)
    # Far from 0 the formula with tanh loses digits, as in torch.
    np.testing.assert_allclose(outputs["input_grad"], g * slope, rtol=2e-6, atol=2e-6 if exact else 5e-6)


def test_two_of_the_same_value(tmp_path: Path) -> None:
    """Two Gelus of one x, whose gradients add up."""
    graph = model(
        "d1 = Div x root2; e1 = Erf d1; a1 = Add e1 one; h1 = Mul half a1; y1 = Mul x h1;"
        "d = Mul x root_half; e = Erf d; a = Add one e; h = Mul half x; y2 = Mul h a; y = Add y1 y2"
    )
    made = differentiated(graph, ["input"], tmp_path / "m.onnx", fast=True)
    assert [node.op_type for node in made.node].count("Erf") == 2
    x = RNG.normal(size=(64, 32)).astype("float32")
    feeds = {"input": x, "bias": np.zeros(32, "float32"), "g": np.ones_like(x)}
    below = np.vectorize(math.erf)(x.astype("float64") / math.sqrt(2)) / 2 + 0.5
    slope = below + x * np.exp(-(x.astype("float64") ** 2) / 2) / math.sqrt(2 * math.pi)
    np.testing.assert_allclose(run_graph(tmp_path / "m.onnx", feeds)["input_grad"], 2 * slope, rtol=5e-6, atol=5e-6)


@pytest.mark.parametrize("name", NEITHER)
def test_what_is_not_a_gelu(name: str) -> None:
    forward = model(NEITHER[name])
    before = [node.op_type for node in forward.graph.node]
    gelu.fuse(forward.graph)
    assert [node.op_type for node in forward.graph.node] == before


def norm(axis: int, rank: int) -> tuple[onnx.ModelProto, dict[str, Array]]:
    dims = [6, 5, 48][-rank:]
    nodes = [
        helper.make_node("LayerNormalization", ["x", "scale", "shift"], ["n"], axis=axis, epsilon=1e-3),
        helper.make_node("Pow", ["n", "two"], ["q"]),
        helper.make_node("Mul", ["q", "n"], ["p"]),
        helper.make_node("Add", ["p", "x"], ["r"]),
        helper.make_node("Mul", ["r", "g"], ["w"]),
        helper.make_node("ReduceSum", ["w"], ["loss"], keepdims=0),
    ]
    width = dims[axis:]
    feeds = {
        "x": RNG.normal(1, 2, size=dims).astype("float32"),
        "scale": RNG.normal(size=width).astype("float32"),
        "shift": RNG.normal(size=width).astype("float32"),
        "g": RNG.normal(size=dims).astype("float32"),
    }
    inputs = [value(name, array.shape) for name, array in feeds.items()]
    constants = [numpy_helper.from_array(np.float32(2), "two")]
    graph = helper.make_graph(nodes, "norm", inputs, [value("loss", [])], constants)
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=9), feeds


@pytest.mark.parametrize(("axis", "rank"), [(-1, 3), (1, 2), (2, 3), (1, 3)])
def test_same_gradients_as_without(axis: int, rank: int, tmp_path: Path) -> None:
    """LayerNormalization, powers, and values that several gradients flow into."""
    forward, feeds = norm(axis, rank)
    slow = onnx.ModelProto()
    slow.CopyFrom(forward)
    names = ["x", "scale", "shift"]
    differentiated(slow, names, tmp_path / "slow.onnx", fast=False)
    graph = differentiated(forward, names, tmp_path / "fast.onnx", fast=True)
    assert not {"Pow", "LayerNormalizationGrad"} & {node.op_type for node in graph.node}
    expected, actual = (run_graph(tmp_path / f"{name}.onnx", feeds) for name in ("slow", "fast"))
    assert expected.keys() == actual.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(actual[name], array, rtol=1e-5, atol=2e-5 * np.abs(array).max())


def test_sums_of_whole_numbers(tmp_path: Path) -> None:
    """How many rows chose each expert: a sum of int64 over the first axis, which divides what is trained."""
    nodes = [
        helper.make_node("Cast", ["chosen"], ["whole"], to=onnx.TensorProto.INT64),
        helper.make_node("ReduceSum", ["whole", "first"], ["counts"], keepdims=0),
        helper.make_node("Cast", ["counts"], ["number"], to=onnx.TensorProto.FLOAT),
        helper.make_node("Div", ["w", "number"], ["share"]),
        helper.make_node("Mul", ["x", "share"], ["y"]),
        helper.make_node("ReduceSum", ["y"], ["loss"], keepdims=0),
    ]
    feeds = {
        "x": RNG.normal(size=(6, 4)).astype("float32"),
        "w": RNG.normal(size=4).astype("float32"),
        "chosen": RNG.integers(1, 3, size=(6, 4)).astype("float32"),
    }
    inputs = [value(name, array.shape) for name, array in feeds.items()]
    inner = [value("whole", [6, 4], "int64"), value("counts", [4], "int64")]
    constants = [numpy_helper.from_array(np.array([0]), "first")]
    graph = helper.make_graph(nodes, "counts", inputs, [value("loss", [])], constants, value_info=inner)
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=9)
    made = differentiated(model, ["w"], tmp_path / "m.onnx", fast=True)
    # The gradient's own sum over rows is still a product with ones.
    assert [node.op_type for node in made.node].count("MatMul") == 1
    outputs = run_graph(tmp_path / "m.onnx", feeds)
    expected = feeds["x"].astype("float64").sum(0) / feeds["chosen"].sum(0)
    np.testing.assert_allclose(outputs["w_grad"], expected, rtol=1e-5, atol=1e-6)
