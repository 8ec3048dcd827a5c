"""Training graphs in half precision: what is stored as half, what stays fp32, and that the gradient stays right."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import load_file

from ortflow.workflow.assembly.build import build_graphs
from ortflow.workflow.fusion.half import half
from ortflow.workflow.graph.ir import shapes
from ortflow.workflow.graph.memory.element_types import element_types
from ortflow.workflow.onnx_runtime import onnxruntime
from ortflow.workflow.spec.run import TrainerRunSpec

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "gpt"))
from model import Config, build

FP16 = TensorProto.FLOAT16
Array = np.ndarray[Any, Any]


def node(operator: str, *names: str, domain: str = "", **attributes: Any) -> onnx.NodeProto:
    """`names` end with the output."""
    return helper.make_node(operator, names[:-1], names[-1:], domain=domain, **attributes)


def model_of(
    nodes: Sequence[onnx.NodeProto], inputs: Mapping[str, Sequence[int | str]], outputs: Sequence[str]
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(np.float32(0.5), "a_half")],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("ortflow.cuda", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    shapes.infer(model, [])
    return model


def run(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> dict[str, Array]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, {i.name: feeds[i.name] for i in session.get_inputs()}), strict=True))


def kinds(model: onnx.ModelProto, operator: str) -> list[tuple[list[int], list[int]]]:
    """Element types of the inputs and outputs of each node of an operator."""
    types = element_types(model)
    return [
        ([types[name] for name in one.input], [types[name] for name in one.output])
        for one in model.graph.node
        if one.op_type == operator
    ]


def test_the_gradient_of_a_gpt_is_right_to_the_rounding_of_fp16(tmp_path: Path) -> None:
    config = Config(vocabulary=64, context=32, width=64, heads=4, layers=2)
    onnx.save(build(config), tmp_path / "model.onnx")
    spec = TrainerRunSpec.model_validate(
        {
            "name": "half",
            "model": {"path": str(tmp_path / "model.onnx"), "loss": {"kind": "cross_entropy"}},
            "data": {"train": {"path": "none"}, "micro_batch": 4},
            "train": {"steps": 1, "optimizer": {"name": "adamw", "lr": 1e-3}},
        }
    )
    graphs = build_graphs(spec, tmp_path / "graphs")
    single = onnx.load(graphs.train)
    trained = [entry.name for entry in graphs.index if f"{entry.name}_grad" in {o.name for o in single.graph.output}]
    halved = half(single, FP16, trained, {})
    assert [(v.name, v.type) for v in halved.graph.output] == [(v.name, v.type) for v in single.graph.output]
    assert {(*given, *made) for given, made in kinds(halved, "MatMul")} == {(FP16, FP16, FP16)}
    random = np.random.default_rng(0)
    feeds = {name: random.integers(0, 64, (4, 32)) for name in ("tokens", "labels")} | load_file(graphs.initial)
    exact, mine = run(single, feeds), run(halved, feeds)
    for name, array in exact.items():
        apart = np.linalg.norm(mine[name] - array) / np.linalg.norm(array)
        assert apart < 4e-3, (name, apart)
    assert len(exact) == len(trained) + 2


def test_what_crosses_to_another_group_is_stored_as_half_and_read_as_such() -> None:
    nodes = [
        node("MatMul", "x", "w", "product"),
        node("Add", "product", "bias", "h"),
        node("MatMul", "h", "w", "again"),
        node("Add", "again", "h", "y"),
        node("ReduceSum", "y", "loss", keepdims=0),
    ]
    halved = half(model_of(nodes, {"x": ["n", 256], "w": [256, 256], "bias": [256]}, ["loss"]), FP16, ["w", "bias"], {})
    types, makers = element_types(halved), {name: one for one in halved.graph.node for name in one.output}
    residual = next(one for one in halved.graph.node if one.output[0] == "y")
    kept = makers[residual.input[1]]
    assert (kept.op_type, types[kept.input[0]]) == ("Cast", FP16), "the residual is read as stored"
    stored = makers[kept.input[0]]
    assert (stored.op_type, stored.input[0]) == ("Cast", "h"), "and stored once, for the product too"
    assert kinds(halved, "Add") == [([1, 1], [1]), ([1, 1], [1])], "sums are in fp32"
    assert kinds(halved, "ReduceSum") == [([1], [1])]
    bias = next(one for one in halved.graph.node if one.output[0] == "h")
    assert bias.input[1] == "bias", "a parameter is not rounded for a sum"


def test_what_depends_on_no_parameter_stays_fp32() -> None:
    nodes = [
        node("MatMul", "positions", "frequencies", "angles"),
        node("Cos", "angles", "cosines"),
        node("MatMul", "x", "w", "product"),
        node("Mul", "product", "cosines", "turned"),
        node("ReduceSum", "turned", "loss", keepdims=0),
    ]
    inputs = {"x": ["n", 256], "w": [256, 256], "positions": ["n", 1], "frequencies": [1, 256]}
    halved = half(model_of(nodes, inputs, ["loss"]), FP16, ["w"], {})
    assert kinds(halved, "MatMul") == [([1, 1], [1]), ([FP16, FP16], [FP16])]


def test_a_transposed_parameter_is_transposed_as_half() -> None:
    nodes = [
        node("Transpose", "table", "turned", perm=[1, 0]),
        node("MatMul", "x", "turned", "scores"),
        node("ReduceSum", "scores", "loss", keepdims=0),
    ]
    halved = half(model_of(nodes, {"x": ["n", 64], "table": [1000, 64]}, ["loss"]), FP16, ["table"], {})
    assert kinds(halved, "Transpose") == [([FP16], [FP16])]


def test_data_that_moves_keeps_its_type_and_outputs_theirs() -> None:
    nodes = [
        node("MatMul", "x", "w", "product"),
        node("Transpose", "product", "turned", perm=[1, 0]),
        node("Reshape", "turned", "shape", "flat"),
        node("Exp", "small", "e"),
        node("MatMul", "e", "w", "second"),
    ]
    model = model_of(nodes, {"x": [64, 256], "w": [256, 256], "small": [1, 256]}, ["flat", "product", "second"])
    model.graph.initializer.append(numpy_helper.from_array(np.array([-1]), "shape"))
    halved = half(model, FP16, ["w"], {})
    assert kinds(halved, "Transpose") == [([FP16], [FP16])]
    assert [value.type.tensor_type.elem_type for value in halved.graph.output] == [TensorProto.FLOAT] * 3
    feeds = {name: np.random.default_rng(0).normal(size=(64 if name == "x" else 256 if name == "w" else 1, 256)) for
             name in ("x", "w", "small")}  # fmt: skip
    feeds = {name: array.astype(np.float32) for name, array in feeds.items()}
    exact, mine = run(model, feeds), run(halved, feeds)
    for name in exact:
        assert mine[name].dtype == np.float32
        np.testing.assert_allclose(mine[name], exact[name], rtol=0, atol=2e-2 * np.abs(exact[name]).max())


def test_an_operator_of_ours_takes_and_makes_halves_where_it_may() -> None:
    nodes = [
        node("MatMul", "x", "w", "product"),
        helper.make_node("Norm", ["product", "scale"], ["y", "mean"], domain="ortflow.cuda"),
        node("MatMul", "y", "w", "z"),
        node("ReduceSum", "z", "loss", keepdims=0),
        node("ReduceSum", "mean", "other", keepdims=0),
    ]
    model = model_of(nodes, {"x": ["n", 256], "w": [256, 256], "scale": [256]}, ["loss", "other"])
    for name, dims in (("y", ["n", 256]), ("mean", ["n", 1]), ("z", ["n", 256])):
        model.graph.value_info.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, dims))
    halved = half(model, FP16, ["w", "scale"], {"Norm": (frozenset({0}), frozenset({0}))})
    assert kinds(halved, "Norm") == [([FP16, TensorProto.FLOAT], [FP16, TensorProto.FLOAT])]
    assert sum(one.op_type == "Cast" for one in halved.graph.node) == 3, "x, w, and z for its sum"


@pytest.mark.parametrize("kind", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_convolutions_are_half_in_fp16_alone(kind: int) -> None:
    nodes = [node("Conv", "x", "w", "c"), node("ReduceSum", "c", "loss", keepdims=0)]
    halved = half(model_of(nodes, {"x": [2, 8, 64, 64], "w": [8, 8, 3, 3]}, ["loss"]), kind, ["w"], {})
    expected = FP16 if kind == FP16 else TensorProto.FLOAT
    assert kinds(halved, "Conv") == [([expected, expected], [expected])]
