"""Graphs with our operators compute the same as without them, and products absorb adjacent nodes."""

from __future__ import annotations

import sys
from collections import Counter
from itertools import permutations
from pathlib import Path

import numpy as np
import onnx
import pytest
from graph_build_models import Array, built, run_graph, tensors_of
from kernels import LIBRARY, needs_kernels, normal, off
from onnx import helper, numpy_helper

from ortflow.workflow.graph.autodiff.compose import compose
from ortflow.workflow.graph.forms import Form
from ortflow.workflow.kernels.graph import with_kernels

pytestmark = needs_kernels


def operators(model: onnx.ModelProto) -> Counter[str]:
    return Counter(f"{node.domain}.{node.op_type}" if node.domain else node.op_type for node in model.graph.node)


def graph(
    lines: str,
    inputs: dict[str, tuple[int, ...]],
    result: str = "y",
    dtype: str = "float32",
    constants: dict[str, Array] | None = None,
    attributes: dict[str, dict[str, object]] | None = None,
) -> onnx.ModelProto:
    """`result = Operator a b; …`; attributes by the name of the result."""
    nodes = []
    for line in lines.split(";"):
        made, operator, *read = line.replace("=", " ").split()
        domain = "com.microsoft" if operator in ("FusedMatMul", "SoftmaxGrad_13", "ConvGrad") else ""
        nodes.append(
            helper.make_node(
                operator, read, made.split(","), name=made, domain=domain, **(attributes or {}).get(made, {})
            )
        )
    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    tensors = [numpy_helper.from_array(array, name) for name, array in (constants or {}).items()]
    model = helper.make_model(
        helper.make_graph(
            nodes,
            "graph",
            [helper.make_tensor_value_info(name, element, dims) for name, dims in inputs.items()],
            [helper.make_tensor_value_info(result, element, None)],
            tensors,
        ),
        opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)],
        ir_version=9,
    )
    return onnx.shape_inference.infer_shapes(model)


def same(model: onnx.ModelProto, dtype: str = "float32") -> Counter[str]:
    """Check that the graph computes the same with our operators; the operators after that."""
    ours = with_kernels(model)
    feeds = {
        i.name: normal(place, *(d.dim_value for d in i.type.tensor_type.shape.dim)).astype(dtype)
        for place, i in enumerate(model.graph.input)
    }
    expected, found = run_graph(compose(model), feeds), run_graph(ours, feeds, kernels=LIBRARY.path)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert off(found[name], array) < 2e-6
    return operators(ours)


def test_bias_and_transposes_and_scale_disappear_into_a_product() -> None:
    turned = {"t": {"perm": [0, 2, 1, 3]}, "u": {"perm": [0, 2, 3, 1]}, "y": {"perm": [0, 2, 1, 3]}}
    attention = graph(
        "t = Transpose a; u = Transpose b; p = MatMul t u; y = Transpose p",
        {"a": (2, 5, 3, 7), "b": (2, 6, 3, 7)},
        attributes=turned,
    )
    assert same(attention) == {"ortflow.Product": 1}
    assert same(graph("p = MatMul x w; y = Add p b", {"x": (2, 5, 7), "w": (7, 3), "b": (3,)})) == {
        "ortflow.Product": 1
    }
    assert same(graph("y = Gemm x w b", {"x": (5, 7), "w": (7, 3), "b": (3,)})) == {"ortflow.Product": 1}
    fused = {"y": {"transA": 1, "transB": 1, "alpha": 0.25}}
    flat = graph("y = FusedMatMul x w", {"x": (2, 7, 5), "w": (3, 7)}, attributes=fused)
    assert same(flat) == {"ortflow.Product": 1}
    masked = graph(
        "s = Mul x k; m = Add s mask; y = Softmax m",
        {"x": (2, 3, 5, 5), "mask": (5, 5)},
        constants={"k": np.float32(0.125)},
    )
    assert same(masked) == {"ortflow.Softmax": 1}
    divided = graph("s = Div x k; y = Softmax s", {"x": (2, 5)}, constants={"k": np.float32(8)})
    assert same(divided) == {"ortflow.Softmax": 1}
    gradient = graph(
        "g = SoftmaxGrad_13 d s; y = Mul k g", {"d": (2, 5), "s": (2, 5)}, constants={"k": np.float32(0.125)}
    )
    assert same(gradient) == {"ortflow.SoftmaxGrad": 1}


@pytest.mark.parametrize(
    ("inputs", "attributes"),
    [
        ({"dy": (3, 6, 5, 4), "x": (3, 4, 9, 9), "w": (6, 4, 3, 2)}, {"strides": [2, 2], "pads": [1, 0, 1, 0]}),
        ({"dy": (3, 6, 9, 9), "x": (3, 4, 9, 9), "w": (6, 4, 1, 1)}, {}),
        ({"dy": (3, 6, 7, 8), "x": (3, 4, 9, 9), "w": (6, 2, 3, 2)}, {"group": 2, "kernel_shape": [3, 2]}),
        ({"dy": (3, 6, 5), "x": (3, 4, 9), "w": (6, 4, 3)}, {"dilations": [2]}),
        ({"dy": (2, 3, 2, 3, 4), "x": (2, 4, 3, 3, 4), "w": (3, 4, 2, 1, 3)}, {"pads": [0, 0, 1, 0, 0, 1]}),
    ],
    ids=["strides", "1x1", "groups", "one axis", "three axes"],
)
def test_a_convolution_has_gradients_of_ours(inputs: dict[str, tuple[int, ...]], attributes: dict[str, object]) -> None:
    convolution = graph(
        "dx,dw,db = ConvGrad dy x w; a = Reshape dx flat; b = Reshape dw flat; c = Reshape db flat; y = Concat a b c",
        inputs,
        constants={"flat": np.array([-1])},
        attributes={"dx,dw,db": attributes, "y": {"axis": 0}},
    )
    found = same(convolution)
    assert found["com.microsoft.ConvGrad"] == 0
    assert (found["ortflow.ConvDataGrad"], found["ortflow.ConvWeightGrad"]) == (1, 1)


@pytest.mark.parametrize("order", [*permutations(range(3)), *permutations(range(4))])
def test_a_product_is_right_in_every_order_of_its_axes(order: tuple[int, ...]) -> None:
    """A Transpose that leaves neither rows nor columns contiguous is not absorbed."""
    inputs = {"x": (2, 3, 4, 5), "w": (2, 3, 5, 6)} if len(order) == 4 else {"x": (2, 4, 5), "w": (2, 5, 6)}
    attributes: dict[str, dict[str, object]] = {"y": {"perm": list(order)}}
    found = same(graph("p = MatMul x w; y = Transpose p", inputs, attributes=attributes))
    assert found == ({"ortflow.Product": 1} if order[-1] >= len(order) - 2 else {"ortflow.Product": 1, "Transpose": 1})


def test_an_interaction_of_features_is_right() -> None:
    """All dot products of a sample's vectors, gathered by pairs of axes: the exporter moves the batch to the end."""
    model = graph(
        "t = Transpose v; p = MatMul v t; q = Transpose p; y = GatherND q pairs",
        {"v": (6, 5, 8)},
        constants={"pairs": np.array([[1, 0], [2, 0], [2, 1], [4, 3]])},
        attributes={"t": {"perm": [0, 2, 1]}, "q": {"perm": [1, 2, 0]}},
    )
    assert same(model) == {"ortflow.Product": 1, "Transpose": 1, "GatherND": 1}


@pytest.mark.parametrize(
    ("lines", "inputs", "kept"),
    [
        ("p = MatMul x w; q = Add p b; y = Add q p", {"x": (5, 7), "w": (7, 3), "b": (3,)}, {"Add": 2}),
        ("p = MatMul x w; y = Add p b", {"x": (5, 7), "w": (7, 3), "b": (5, 3)}, {"Add": 1}),
        ("p = MatMul x w; y = Add p b", {"x": (5, 7), "w": (7, 1), "b": (4,)}, {"Add": 1}),
        ("p = MatMul x w; y = Add p p", {"x": (5, 7), "w": (7, 3)}, {"Add": 1}),
        ("m = Add x mask; s = Softmax m; y = Add s m", {"x": (2, 5), "mask": (5,)}, {"Add": 2}),
    ],
)
def test_what_others_read_too_or_what_has_another_shape_stays(
    lines: str, inputs: dict[str, tuple[int, ...]], kept: dict[str, int]
) -> None:
    found = same(graph(lines, inputs))
    assert {name: count for name, count in found.items() if not name.startswith("ortflow.")} == kept


def test_a_scale_with_axes_of_its_own_stays() -> None:
    model = graph("s = Mul x k; y = Softmax s", {"x": (5,)}, constants={"k": np.full((1, 1), 0.5, np.float32)})
    assert same(model)["Mul"] == 1


@pytest.mark.parametrize(
    ("lines", "inputs", "dtype"),
    [
        ("y = MatMul x w", {"x": (7,), "w": (7, 3)}, "float32"),
        ("y = MatMul x w", {"x": (5, 7), "w": (7,)}, "float32"),
        ("y = MatMul x w", {"x": (5, 7), "w": (7, 3)}, "float64"),
        ("y = Softmax x", {"x": (5, 7)}, "float64"),
        ("y = Gemm x w b", {"x": (5, 7), "w": (7, 3), "b": (5, 3)}, "float32"),
    ],
)
def test_vectors_and_other_types_are_left_to_onnx_runtime(
    lines: str, inputs: dict[str, tuple[int, ...]], dtype: str
) -> None:
    found = same(graph(lines, inputs, dtype=dtype), dtype)
    assert not any(name.startswith("ortflow.") for name in found)


@pytest.mark.parametrize(("scale", "ours"), [((7,), True), ((1,), False), ((5, 7), False)])
def test_a_scale_that_is_spread_over_the_last_axis_is_left_to_onnx_runtime(scale: tuple[int, ...], ours: bool) -> None:
    model = graph("y,m,i = LayerNormalization x s", {"x": (2, 5, 7), "s": scale})
    (operator,) = operators(with_kernels(model))
    assert operator == ("ortflow.LayerNormalization" if ours else "LayerNormalization")
    if ours:
        same(model)


def test_sums_and_softmax_over_other_axes_are_left_to_onnx_runtime() -> None:
    axes = {"axes": np.array([1])}
    keep = {"y": {"keepdims": 0}}
    assert same(graph("y = ReduceSum x axes", {"x": (5, 7)}, constants=axes, attributes=keep)) == {"ReduceSum": 1}
    assert same(graph("y = Softmax x", {"x": (5, 7)}, attributes={"y": {"axis": 0}})) == {"Softmax": 1}


HALVES = "b = Slice x three end last; a = Slice x zero three last"
TURNED = "n = Neg b; c = Concat n a; u = Mul c sin"
FORWARD = f"{HALVES}; {TURNED}; v = Mul x cos; y = Add v u"
PARTS = "z = Mul x sin; a,b = Split z; n = Neg a; d = Pad n behind; e = Pad b before"
JOINED = "z = Mul x sin; a,b = Split z; n = Neg a; c = Concat b n; v = Mul x cos; y = Add v c"
BACKWARD = f"v = Mul x cos; {PARTS}; f = Add d e; y = Add f v"
ROTARY: dict[str, dict[str, object]] = {"c": {"axis": -1}, "a,b": {"axis": -1, "num_outputs": 2}}
SWAP = {"perm": [0, 2, 1, 3]}


def rotation(
    lines: str, dims: tuple[int, ...] = (2, 3, 4, 6), table: tuple[int, ...] = (1, 1, 4, 6)
) -> onnx.ModelProto:
    numbers = {"zero": [0], "three": [3], "minus_three": [-3], "end": [2**63 - 1], "two": [2], "last": [-1]}
    zeros = [0] * (len(dims) - 1)
    numbers |= {"behind": [*zeros, 3, *zeros, 0], "before": [*zeros, 0, *zeros, 3], "between": [*zeros, 1, *zeros, 2]}
    return graph(
        lines, {"x": dims, "cos": table, "sin": table}, constants={k: np.array(v) for k, v in numbers.items()},
        attributes={**ROTARY, "t": SWAP, "y": SWAP if "Transpose" in lines.split(";")[-1] else {}},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("lines", "dims", "table", "operator"),
    [
        (FORWARD, (2, 3, 4, 6), (1, 1, 4, 6), "Rotary"),
        (FORWARD, (5, 6), (6,), "Rotary"),
        (f"a,b = Split x; {TURNED}; v = Mul cos x; y = Add u v", (2, 3, 4, 6), (2, 1, 4, 6), "Rotary"),
        (FORWARD.replace("Slice x three", "Slice x minus_three"), (2, 3, 4, 6), (4, 6), "Rotary"),
        (f"t = Transpose x; {FORWARD.replace(' x', ' t')}", (2, 4, 3, 6), (1, 1, 4, 6), "Rotary"),
        (BACKWARD, (2, 3, 4, 6), (1, 1, 4, 6), "RotaryGrad"),
        (BACKWARD.replace("Add d e", "Add d v").replace("Add f v", "Add e f"), (2, 3, 4, 6), (4, 6), "RotaryGrad"),
        (BACKWARD.replace("y = Add", "s = Add") + "; y = Transpose s", (2, 3, 4, 6), (1, 1, 4, 6), "RotaryGrad"),
        (JOINED, (2, 3, 4, 6), (1, 1, 4, 6), "RotaryGrad"),
        (JOINED.replace("Add v c", "Add c v"), (5, 6), (6,), "RotaryGrad"),
    ],
)
def test_rotary_positions_are_one_node(
    lines: str, dims: tuple[int, ...], table: tuple[int, ...], operator: str
) -> None:
    assert same(rotation(lines, dims, table)) == {f"ortflow.{operator}": 1}


@pytest.mark.parametrize("tokens", [4, 3000], ids=["few", "too many to be folded"])
@pytest.mark.parametrize(("lines", "operator"), [(FORWARD, "Rotary"), (BACKWARD, "RotaryGrad")])
def test_tables_of_rotary_positions_may_be_constants(lines: str, operator: str, tokens: int) -> None:
    model = rotation(lines, (2, 3, tokens, 6), (tokens, 6))
    for name in ("cos", "sin"):
        model.graph.initializer.append(numpy_helper.from_array(normal(len(name), tokens, 6), name))
    inputs = [value for value in model.graph.input if value.name == "x"]
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    assert same(model) == {f"ortflow.{operator}": 1}


@pytest.mark.parametrize(
    ("lines", "dims", "table"),
    [
        (FORWARD, (1, 3, 4, 6), (2, 1, 4, 6)),
        (FORWARD, (2, 3, 4, 6), (4, 1)),
        (FORWARD.replace("three", "two"), (2, 3, 4, 6), (4, 6)),
        (FORWARD.replace("Slice x zero three", "Slice x three end"), (2, 3, 4, 6), (4, 6)),
        (FORWARD.replace("Neg b", "Neg a").replace("Concat n a", "Concat n b"), (2, 3, 4, 6), (4, 6)),
        (FORWARD.replace("y = Add v u", "w = Add v u; y = Add w c"), (2, 3, 4, 6), (4, 6)),
        (BACKWARD.replace("behind", "between"), (2, 3, 4, 6), (4, 6)),
        (BACKWARD.replace("Neg a", "Neg b").replace("Pad b", "Pad a"), (2, 3, 4, 6), (4, 6)),
        (BACKWARD.replace("y = Add f v", "w = Add f v; y = Add w z"), (2, 3, 4, 6), (4, 6)),
        (JOINED.replace("Neg a", "Neg b").replace("Concat b", "Concat a"), (2, 3, 4, 6), (4, 6)),
        (JOINED.replace("Concat b n", "Concat n b"), (2, 3, 4, 6), (4, 6)),
        (JOINED.replace("y = Add v c", "w = Add v c; y = Add w z"), (2, 3, 4, 6), (4, 6)),
    ],
)
def test_what_only_resembles_rotary_positions_stays(lines: str, dims: tuple[int, ...], table: tuple[int, ...]) -> None:
    assert not any("Rotary" in name for name in same(rotation(lines, dims, table)))


def test_an_identity_between_input_and_output_keeps_the_names() -> None:
    assert same(graph("y = Identity x", {"x": (5, 7)})) == {"Identity": 1}
    assert same(graph("i = Identity x; p = MatMul i w; y = Identity p", {"x": (5, 7), "w": (7, 3)}))["Identity"] == 1


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    examples = Path(__file__).parents[2] / "examples" / "gpt"
    sys.path.insert(0, str(examples))
    try:
        from model import Config, build
    finally:
        sys.path.remove(str(examples))
    path = tmp_path_factory.mktemp("gpt") / "model.onnx"
    onnx.save(build(Config(layers=2, width=64, heads=4, context=32, dropout=0.0)), path)
    return path


def test_a_transformer_has_our_operators_throughout_and_the_same_gradients(gpt: Path) -> None:
    graphs = built(gpt)
    feeds = tensors_of(graphs)
    random = np.random.default_rng(0)
    feeds |= {name: random.integers(0, 256, (4, 32)) for name in ("tokens", "labels")}
    expected = run_graph(graphs.train, feeds)
    ours = onnx.load(Form.KERNELS.of(graphs.train))
    found = run_graph(ours, feeds, kernels=LIBRARY.path)
    for name, array in expected.items():
        assert off(found[name], array) < 2e-5, name
    left = {name for name in operators(ours) if not name.startswith("ortflow.")}
    assert not left & {"MatMul", "Gemm", "com.microsoft.FusedMatMul", "LayerNormalization", "Softmax", "Erf", "Exp"}
    assert operators(ours)["Transpose"] <= 2  # of the embedding that is also the head


def test_a_graph_that_onnx_runtime_refuses_with_our_operators_is_trained_without(
    gpt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ortflow.workflow.assembly import targets

    def broken(model: onnx.ModelProto, length: int = 0) -> onnx.ModelProto:
        copy = with_kernels(model)
        next(node for node in copy.graph.node if node.domain == "ortflow").op_type = "Nonesuch"
        return copy

    monkeypatch.setattr(targets, "with_kernels", broken)
    graphs = built(gpt)
    assert not Form.KERNELS.of(graphs.train).exists()
    assert any("ONNX Runtime's own kernels" in note and "Nonesuch" in note for note in graphs.notes)
