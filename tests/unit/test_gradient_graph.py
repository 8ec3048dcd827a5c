"""`ortflow.grad`: gradients of a model as one standard ONNX model."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from graph_build_models import Array, run_graph
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from precise_operators import OPERATORS
from random_graphs import RandomGraph

import ortflow
from ortflow.workflow.errors import UserError
from ortflow.workflow.onnx_runtime import onnxruntime

STEP = 1e-6
FLOAT = TensorProto.FLOAT


def value(name: str, *shape: int | str | None, kind: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def dense(*, opset: int = 18, ir: int = 8, kind: int = FLOAT) -> onnx.ModelProto:
    """y = tanh(x w + b), a matrix, and its mean square, a scalar; `unused` is read by no node."""
    random = np.random.default_rng(1)
    real = helper.tensor_dtype_to_np_dtype(kind)
    weights = {"w": random.normal(size=(4, 3)).astype(real), "b": random.normal(size=3).astype(real)}
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["xw"], "product"),
        helper.make_node("Add", ["xw", "b"], ["sum"], "sum"),
        helper.make_node("Tanh", ["sum"], ["y"], "tanh"),
        helper.make_node("Mul", ["y", "y"], ["squares"], "squares"),
        helper.make_node("ReduceMean", ["squares"], ["loss"], "mean", keepdims=0),
    ]
    inputs = [value("x", "batch", 4, kind=kind), value("unused", 2, kind=kind), value("count", kind=TensorProto.INT64)]
    outputs = [value("y", "batch", 3, kind=kind), value("loss", kind=kind)]
    tensors = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "dense", inputs, outputs, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir)


def precise(model: onnx.ModelProto) -> ReferenceEvaluator:
    """The model in double precision."""
    double = onnx.ModelProto()
    double.CopyFrom(model)
    for tensor in double.graph.initializer:
        if tensor.data_type == FLOAT:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype("float64"), tensor.name))
    for described in (*double.graph.input, *double.graph.output):
        described.type.tensor_type.elem_type = TensorProto.DOUBLE
    return ReferenceEvaluator(double, new_ops=OPERATORS)


def slope(
    model: onnx.ModelProto,
    outputs: Mapping[str, Array],
    values: Mapping[str, Array],
    along: Mapping[str, Array],
) -> float:
    """The derivative along a direction of the sum of outputs times `outputs`, in double precision."""

    def total(step: float) -> float:
        moved = onnx.ModelProto()
        moved.CopyFrom(model)
        new = {name: array.astype("float64") + step * along.get(name, 0) for name, array in values.items()}
        for tensor in moved.graph.initializer:
            if tensor.name in new:
                tensor.CopyFrom(numpy_helper.from_array(new[tensor.name], tensor.name))
        given = {described.name: new[described.name] for described in model.graph.input}
        found = precise(moved).run(list(outputs), given)
        return float(sum((one * by).sum() for one, by in zip(found, outputs.values(), strict=True)))

    return (total(STEP) - total(-STEP)) / (2 * STEP)


def is_standard(model: onnx.ModelProto) -> bool:
    onnx.checker.check_model(model, full_check=True)
    return not any(node.domain for node in model.graph.node)


@pytest.mark.parametrize("seed", range(0, 60, 2))
def test_random_graph(seed: int) -> None:
    """Of all outputs at once, whose gradients are inputs, to all inputs and weights, against differences."""
    graph = RandomGraph(seed)
    model, values = graph.model(), {**graph.feeds, **graph.weights}
    outputs = [described.name for described in model.graph.output]
    before = model.SerializeToString()
    made = ortflow.grad(model, outputs, list(values))
    assert model.SerializeToString() == before
    assert is_standard(made)
    random = np.random.default_rng(seed)
    # A scalar has the derivative 1.
    cotangents = {
        name: random.normal(size=graph.shapes[name]).astype(np.float32) if graph.shapes[name] else np.float32(1)
        for name in outputs
    }
    read = {described.name for described in made.graph.input}
    feeds = {**graph.feeds, **{f"{name}_grad": one for name, one in cotangents.items()}}
    found = run_graph(made, {name: array for name, array in feeds.items() if name in read})
    # ONNX Runtime computes some of these models wrongly; the result has them in other forms.
    expected = precise(model).run(outputs, {name: array.astype("float64") for name, array in graph.feeds.items()})
    for name, array in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(found[name], array, rtol=2e-4, atol=2e-5)
    along = {name: random.normal(size=array.shape) for name, array in values.items()}
    parts = {name: (found[f"{name}_grad"] * along[name]).astype("float64") for name in values}
    size = sum(float(np.abs(part).sum()) for part in parts.values())
    for name, part in parts.items():
        by = slope(model, cotangents, values, {name: along[name]})
        assert float(part.sum()) == pytest.approx(by, rel=1e-4, abs=1e-4 * size + 1e-7), name


def test_a_scalar_has_the_derivative_one_and_an_initializer_stays_one() -> None:
    made = ortflow.grad(dense(), "loss", ["w", "x"])
    assert [described.name for described in made.graph.input] == ["x", "unused", "count"]
    assert [described.name for described in made.graph.output] == ["y", "loss", "w_grad", "x_grad"]
    assert {tensor.name for tensor in made.graph.initializer} >= {"w", "b"}
    assert is_standard(made)
    w, b = (numpy_helper.to_array(tensor) for tensor in dense().graph.initializer)
    for batch in (1, 5):
        # Dynamic axes stay dynamic.
        x = np.random.default_rng(2).normal(size=(batch, 4)).astype(np.float32)
        y = np.tanh(x @ w + b)
        inner = 2 * y / y.size * (1 - y**2)
        found = run_graph(made, {"x": x, "unused": np.zeros(2, np.float32), "count": np.array(0)})
        np.testing.assert_allclose(found["y"], y, atol=1e-6)
        np.testing.assert_allclose(found["w_grad"], x.T @ inner, atol=1e-6)
        np.testing.assert_allclose(found["x_grad"], inner @ w.T, atol=1e-6)


def test_both_kinds_of_outputs_add_up() -> None:
    made = ortflow.grad(dense(), ["y", "loss"], "b")
    assert [described.name for described in made.graph.input] == ["x", "unused", "count", "y_grad"]
    w, b = (numpy_helper.to_array(tensor) for tensor in dense().graph.initializer)
    random = np.random.default_rng(3)
    x, dy = random.normal(size=(2, 4)).astype(np.float32), random.normal(size=(2, 3)).astype(np.float32)
    y = np.tanh(x @ w + b)
    expected = ((2 * y / y.size + dy) * (1 - y**2)).sum(0)
    feeds = {"x": x, "unused": np.zeros(2, np.float32), "count": np.array(0), "y_grad": dy}
    np.testing.assert_allclose(run_graph(made, feeds)["b_grad"], expected, atol=1e-6)


@pytest.mark.parametrize("opset", [13, 17, 20, 22])
def test_any_opset_from_a_file(opset: int, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(dense(opset=opset, ir=9), path)
    made = ortflow.grad(path, "loss", "w")
    assert (made.ir_version, made.opset_import[0].version) == (10, 18)
    feeds = {"x": np.ones((1, 4), np.float32), "unused": np.zeros(2, np.float32), "count": np.array(0)}
    expected = run_graph(ortflow.grad(dense(), "loss", "w"), feeds)["w_grad"]
    np.testing.assert_allclose(run_graph(made, feeds)["w_grad"], expected, atol=1e-7)


def test_weights_that_a_run_would_merge_keep_their_gradients() -> None:
    """A run makes one parameter of a matrix and its transposed copy."""
    model = dense()
    w = numpy_helper.to_array(model.graph.initializer[0])
    model.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(w.T), "turned"))
    model.graph.node.insert(0, helper.make_node("Transpose", ["turned"], ["back"], "transpose", perm=[1, 0]))
    model.graph.node.insert(1, helper.make_node("MatMul", ["x", "back"], ["second"], "second"))
    model.graph.node[3].input[1] = "second"
    model.graph.initializer.pop(1)
    made = ortflow.grad(model, "loss", ["w", "turned"])
    feeds = {"x": np.ones((1, 4), np.float32), "unused": np.zeros(2, np.float32), "count": np.array(0)}
    found = run_graph(made, feeds)
    np.testing.assert_allclose(found["w_grad"], found["turned_grad"].T, atol=1e-7)


def test_an_initializer_that_is_an_input_is_still_a_default() -> None:
    model = dense()
    model.graph.input.append(value("b", 3))
    made = ortflow.grad(model, "loss", "w")
    feeds = {"x": np.ones((1, 4), np.float32), "unused": np.zeros(2, np.float32), "count": np.array(0)}
    session = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run(["w_grad"], feeds)
    (other,) = session.run(["w_grad"], {**feeds, "b": np.full(3, 50, np.float32)})
    assert np.abs(other).max() < 1e-2 < np.abs(found).max()


def test_half_precision_becomes_single_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="fp16 converted to fp32"):
        made = ortflow.grad(dense(kind=TensorProto.FLOAT16), "loss", "w")
    assert {described.type.tensor_type.elem_type for described in made.graph.output} == {FLOAT}
    feeds = {"x": np.ones((1, 4), np.float32), "unused": np.zeros(2, np.float32), "count": np.array(0)}
    assert run_graph(made, feeds)["w_grad"].any()


def test_scalars_of_another_precision_stay_scalars() -> None:
    model = dense(kind=TensorProto.DOUBLE)
    model.graph.initializer.append(numpy_helper.from_array(np.array(2.0), "scale"))
    model.graph.initializer.append(numpy_helper.from_array(np.array(1.0), "constant"))
    model.graph.node[3].input[1] = "scale"
    model.graph.node[2].input[0] = "scaled"
    model.graph.node.insert(2, helper.make_node("Mul", ["sum", "constant"], ["scaled"], "scaled"))
    with pytest.warns(UserWarning, match="double converted to fp32"):
        made = ortflow.grad(model, "loss", "scale")
    dims = {tensor.name: list(tensor.dims) for tensor in made.graph.initializer}
    assert dims["scale"] == dims["constant"] == []
    feeds = {"x": np.ones((1, 4), np.float32), "unused": np.zeros(2, np.float32), "count": np.array(0)}
    found = run_graph(made, feeds)
    assert found["scale_grad"].shape == ()
    np.testing.assert_allclose(found["scale_grad"], found["y"].mean(), rtol=1e-6)


def hard() -> onnx.ModelProto:
    node = helper.make_node("MaxRoiPool", ["x", "rois"], ["y"], "pool", pooled_shape=[2, 2])
    graph = helper.make_graph([node], "hard", [value("x", 1, 1, 4, 4), value("rois", 1, 5)], [value("y", 1, 1, 2, 2)])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def clash() -> onnx.ModelProto:
    model = dense()
    model.graph.node[0].output[0] = model.graph.node[1].input[0] = "w_grad"
    return model


def elsewhere() -> onnx.ModelProto:
    model = dense()
    onnx.external_data_helper.set_external_data(model.graph.initializer[0], "weights")
    return model


@pytest.mark.parametrize(
    ("model", "outputs", "inputs", "words"),
    [
        (dense, "z", "w", r"no output 'z'; its outputs are 'y', 'loss'"),
        (dense, "loss", "z", r"no input or initializer 'z'; its inputs are 'x', 'unused', 'count'"),
        (dense, "loss", [], r"`inputs` is empty"),
        (dense, "loss", ["w", "w"], r"`inputs` has 'w' twice"),
        (dense, "loss", "count", r"'count' has no gradient: its type is int64"),
        (dense, "loss", ["x", "unused"], r"no gradient reaches 'unused': 'loss' does not depend on it"),
        (clash, "loss", "w", r"the model has a value 'w_grad'; rename it"),
        (elsewhere, "loss", "w", r"the values of initializer 'w' are in another file"),
        (hard, "y", "x", r"node 'pool' \(MaxRoiPool\) has no gradient here: .* leave out of `inputs`"),
    ],
)
def test_errors(model: object, outputs: str, inputs: Sequence[str], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        ortflow.grad(model(), outputs, inputs)  # type: ignore[operator]
    assert "\n" not in str(caught.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such model file"):
        ortflow.grad(tmp_path / "model.onnx", "loss", "w")


def test_it_is_loaded_on_first_use() -> None:
    program = "import sys, ortflow; assert 'onnx' not in sys.modules; ortflow.grad; assert 'onnx' in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("marks", [{"sizes": "x"}, {"sizes": '["rows", 1]'}, {"replicas": "zero"}, {"dropout": "-"}])
def test_marks_of_our_own_passes_in_the_model_are_not_read(marks: Mapping[str, str]) -> None:
    model = dense()
    for node in model.graph.node:
        for key, text in marks.items():
            node.metadata_props.add(key=f"ortflow.{key}", value=text)
    made, expected = (ortflow.grad(each, "loss", ["w", "x"]) for each in (model, dense()))
    assert made.SerializeToString(deterministic=True) == expected.SerializeToString(deterministic=True)
