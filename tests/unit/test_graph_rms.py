"""Root mean square normalisation in every form that exporters write: detection, and gradients."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from graph_build_models import Array, run_graph, value
from kernels import LIBRARY, needs_kernels, off
from onnx import helper, numpy_helper

from ortflow.workflow.graph.autodiff.compose import compose
from ortflow.workflow.graph.autodiff.reverse import differentiate
from ortflow.workflow.graph.optimize import rewrites
from ortflow.workflow.kernels.graph import with_kernels

RNG = np.random.default_rng(9)
CONSTANTS = {
    "two": np.float32(2), "one": np.float32(1), "eps": np.float32(1e-2), "last": np.array([-1]), "axis": np.array([2]),
    "first": np.array([1]), "minus": np.float32(-0.5), "three": np.float32(3),
}  # fmt: skip
FORMS = {
    "dynamo": "q = Pow x two; m = ReduceMean q last; v = Add m eps; s = Sqrt v; r = Reciprocal s;"
    "n = Mul x r; y = Mul n scale",
    "torchscript": "q = Pow x two; m = ReduceMean q last; v = Add m eps; s = Sqrt v; r = Div one s;"
    "n = Mul x r; y = Mul scale n",
    "casts": "c = Cast x; q = Pow c two; m = ReduceMean q axis; v = Add eps m; s = Sqrt v; r = Div one s;"
    "k = Mul r c; n = Cast k; y = Mul scale n",
    "onnx": "q = Mul x x; m = ReduceMean q last; v = Add m eps; s = Sqrt v; n = Div x s; y = Mul n scale",
    "power": "q = Mul x x; m = ReduceMean q last; v = Add m eps; r = Pow v minus; n = Mul x r; y = Mul n scale",
    "node": "y = SimplifiedLayerNormalization x scale",
}
OTHERS = {
    "another axis": "q = Mul x x; m = ReduceMean q first; v = Add m eps; s = Sqrt v; n = Div x s; y = Mul n scale",
    "a cube": "q = Pow x three; m = ReduceMean q last; v = Add m eps; s = Sqrt v; n = Div x s; y = Mul n scale",
    "another x": "z = Mul x two; q = Mul z z; m = ReduceMean q last; v = Add m eps; s = Sqrt v; n = Div x s;"
    "y = Mul n scale",
    "two over the root": "q = Mul x x; m = ReduceMean q last; v = Add m eps; s = Sqrt v; r = Div two s;"
    "n = Mul x r; y = Mul n scale",
    "a larger scale": "q = Mul x x; m = ReduceMean q last; v = Add m eps; s = Sqrt v; n = Div x s; y = Mul n whole",
    "read twice": "q = Mul x x; m = ReduceMean q last; v = Add m eps; s = Sqrt v; n = Div x s; k = Mul n scale;"
    "y = Add k n",
}
DIMS = (5, 6, 48)
EPSILON = 1e-2


def model(lines: str) -> onnx.ModelProto:
    """loss = sum(g * formula(input + bias) * input)"""
    nodes = [helper.make_node("Add", ["input", "bias"], ["x"])]
    for place, line in enumerate(lines.split(";")):
        result, operator, *inputs = line.replace("=", " ").split()
        flags = {"axis": -1, "epsilon": EPSILON} if operator == "SimplifiedLayerNormalization" else {}
        flags |= {"to": 1} if operator == "Cast" else {}
        nodes.append(helper.make_node(operator, inputs, [result], name=f"/{place}", **flags))
    nodes.append(helper.make_node("Mul", ["y", "g"], ["weighted"]))
    nodes.append(helper.make_node("ReduceSum", ["weighted"], ["loss"], keepdims=0))
    shapes = {"input": DIMS, "bias": DIMS[-1:], "scale": DIMS[-1:], "g": DIMS, "whole": DIMS}
    inputs = [value(name, list(dims)) for name, dims in shapes.items()]
    constants = [numpy_helper.from_array(number, name) for name, number in CONSTANTS.items()]
    graph = helper.make_graph(nodes, "formula", inputs, [value("loss", [])], constants)
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    return onnx.shape_inference.infer_shapes(helper.make_model(graph, opset_imports=imports, ir_version=9))


def feeds_of(deviation: float) -> dict[str, Array]:
    dims = {"input": DIMS, "bias": DIMS[-1:], "scale": DIMS[-1:], "g": DIMS, "whole": DIMS}
    return {name: (RNG.normal(size=size) * deviation).astype("float32") for name, size in dims.items()}


def gradients(forward: onnx.ModelProto, feeds: dict[str, Array], path: Path, library: Path | None) -> dict[str, Array]:
    rewrites.before(forward.graph)
    made, _ = differentiate(forward, ["input", "bias", "scale"], "loss")
    if library is not None:
        made = with_kernels(made)
    rewrites.after(made.graph)
    made = compose(made)
    kinds = {(node.domain, node.op_type) for node in made.graph.node}
    ours = {("ortflow", "RMSNormalization"), ("ortflow", "RMSNormalizationGrad")}
    assert ours <= kinds if library is not None else not any(domain for domain, _ in kinds)
    assert not any(kind.startswith("Simplified") for _, kind in kinds)
    onnx.save(made, path)
    names = {i.name for i in made.graph.input}
    return run_graph(path, {name: array for name, array in feeds.items() if name in names}, kernels=library)


@pytest.mark.parametrize("library", [None, pytest.param(LIBRARY.path, marks=needs_kernels)], ids=["standard", "ours"])
@pytest.mark.parametrize("deviation", [1.0, 1e-3])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_one_node_with_the_right_gradient(
    form: str, deviation: float, library: Path | None, tmp_path: Path
) -> None:
    forward = model(FORMS[form])
    rewrites.before(forward.graph)
    assert [n.op_type for n in forward.graph.node] == ["Add", "SimplifiedLayerNormalization", "Mul", "ReduceSum"]
    feeds = feeds_of(deviation)
    found = gradients(model(FORMS[form]), feeds, tmp_path / "m.onnx", library)
    x, scale, g = (a.astype("d") for a in (feeds["input"] + feeds["bias"], feeds["scale"], feeds["g"]))
    inverse = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + EPSILON)
    normal, scaled = x * inverse, g * scale
    expected = (scaled - normal * (scaled * normal).mean(-1, keepdims=True)) * inverse
    assert found["loss"] == pytest.approx((g * normal * scale).sum(), rel=1e-4)
    assert off(found["input_grad"], expected) < 2e-6
    assert off(found["bias_grad"], expected.sum((0, 1))) < 2e-6
    assert off(found["scale_grad"], (g * normal).sum((0, 1))) < 2e-6


@pytest.mark.parametrize("form", OTHERS)
def test_what_is_another_formula_stays(form: str) -> None:
    forward = model(OTHERS[form])
    before = [node.op_type.replace("Pow", "Mul") for node in forward.graph.node]
    rewrites.before(forward.graph)
    after = [node.op_type for node in forward.graph.node]
    assert after == before if form != "a cube" else "SimplifiedLayerNormalization" not in after


def test_an_axis_of_varying_size_stays() -> None:
    forward = model(FORMS["dynamo"])
    for graph_input in forward.graph.input:
        graph_input.type.tensor_type.shape.dim[-1].dim_param = "width"
    del forward.graph.value_info[:]
    forward = onnx.shape_inference.infer_shapes(forward)
    rewrites.before(forward.graph)
    assert "SimplifiedLayerNormalization" not in {node.op_type for node in forward.graph.node}
