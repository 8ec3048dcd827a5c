"""Marks that stop the gradient: they survive preparation, pass no gradient, and the gradient check honours them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from graph_build_models import Array, built, run_file, run_graph, save_model, tensors_of, value
from onnx import helper
from trainers import trainer_on

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.autodiff.reverse import differentiate
from ortflow.workflow.graph.ir.stops import stop, stops_gradient
from ortflow.workflow.graph.optimize import gelu
from ortflow.workflow.kernels.library import find_library
from ortflow.workflow.trainer import MicroBatch

RNG = np.random.default_rng(4)
X = RNG.normal(size=(5, 4)).astype("float32")


def saved(path: Path, nodes: list[onnx.NodeProto], tensors: dict[str, Array]) -> Path:
    return save_model(path, nodes, [value("x", ["batch", 4])], [value("y", ["batch", 3])], tensors)


def with_stops(path: Path, ratio: float = 0.0) -> Path:
    """y = (h + stop(h^2)) (x u + x stop(u) stop(w)) with h = x w: marks of a value, and of parameters themselves.

    `ratio` of h^2, and of the terms of y, is dropped.
    """
    tensors: dict[str, Array] = {n: (0.5 * RNG.normal(size=(4, 3))).astype("float32") for n in ("w", "u")}
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="/in"),
        helper.make_node("MatMul", ["x", "u"], ["g"], name="/side"),
        helper.make_node("Mul", ["h", "h"], ["square"], name="/square"),
        helper.make_node("Dropout", ["square", "ratio", "training"], ["dropped"], name="/drop"),
        stop("dropped", "fixed", "/detach"),
        stop("w", "w_fixed", "/detach_w"),
        stop("u", "u_fixed", "/detach_u"),
        helper.make_node("Mul", ["w_fixed", "u_fixed"], ["wu"], name="/wu"),
        helper.make_node("MatMul", ["x", "wu"], ["side"], name="/side_wu"),
        helper.make_node("Add", ["h", "fixed"], ["left"], name="/left"),
        helper.make_node("Add", ["g", "side"], ["right"], name="/right"),
        helper.make_node("Mul", ["left", "right"], ["product"], name="/product"),
        helper.make_node("Dropout", ["product", "ratio", "training"], ["y"], name="/out"),
    ]
    tensors |= {"ratio": np.array(ratio, "float32"), "training": np.array(True)}
    return saved(path, nodes, tensors)


LOSS = {"kind": "mse", "label": "labels"}


@pytest.mark.parametrize("kernels", [False, True])
def test_gradients_are_those_with_constants_in_place_of_the_marks(tmp_path: Path, kernels: bool) -> None:
    graphs = built(with_stops(tmp_path / "model.onnx"), LOSS)
    path = graphs.root / "train.kernels.onnx" if kernels else graphs.train
    labels = RNG.normal(size=(5, 3)).astype("float32")
    tensors = tensors_of(graphs)
    library = find_library().path if kernels else None
    if kernels and library is None:
        pytest.skip("no kernels of our own here")
    outputs = run_graph(path, {**tensors, "x": X, "labels": labels}, kernels=library)
    x, w, u = (array.astype("float64") for array in (X, tensors["w"], tensors["u"]))
    h, wu = x @ w, w * u
    left, right = h + h**2, x @ u + x @ wu
    slope = 2 * (left * right - labels) / labels.shape[1]
    scale = outputs["ortflow.loss_sum"] / ((left * right - labels) ** 2).mean(1).sum()
    np.testing.assert_allclose(outputs["w_grad"], scale * (x.T @ (slope * right)), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(outputs["u_grad"], scale * (x.T @ (slope * left)), rtol=1e-5, atol=1e-5)


def test_marks_stand_in_the_training_graph(tmp_path: Path) -> None:
    graphs = built(with_stops(tmp_path / "model.onnx"), LOSS)
    made = {node.output[0]: node for node in onnx.load(graphs.train).graph.node if stops_gradient(node)}
    assert {name: list(node.input) for name, node in made.items()} == {
        "fixed": ["dropped"],
        "w_fixed": ["w"],
        "u_fixed": ["u"],
    }
    assert not {"fixed.whole", "w_fixed.whole"} & {n for node in onnx.load(graphs.train).graph.node for n in node.input}


def test_a_parameter_behind_marks_alone_is_not_trained(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="/in"),
        stop("h", "fixed", "/detach"),
        helper.make_node("Add", ["fixed", "b"], ["y"], name="/bias"),
    ]
    tensors = {"w": RNG.normal(size=(4, 3)).astype("float32"), "b": np.ones(3, "float32")}
    graphs = built(saved(tmp_path / "model.onnx", nodes, tensors), LOSS)
    assert [entry.name for entry in graphs.index if entry.tensor.group in ("decay", "no_decay")] == ["b"]
    assert any("no gradient for it: w" in warning for warning in graphs.warnings)


def test_a_formula_of_gelu_with_a_mark_in_it_is_not_fused() -> None:
    nodes = [
        helper.make_node("Add", ["x", "b"], ["s"]),
        stop("s", "fixed", "/detach"),
        helper.make_node("Div", ["s", "root2"], ["d"]),
        helper.make_node("Erf", ["d"], ["e"]),
        helper.make_node("Add", ["e", "one"], ["a"]),
        helper.make_node("Mul", ["fixed", "a"], ["m"]),
        helper.make_node("Mul", ["m", "half"], ["y"]),
        helper.make_node("ReduceSum", ["y"], ["loss"], keepdims=0),
    ]
    constants = {"root2": 2**0.5, "one": 1.0, "half": 0.5}
    graph = helper.make_graph(
        nodes, "m", [value("x", [5, 4]), value("b", [4])], [value("loss", [])],
        [onnx.numpy_helper.from_array(np.float32(number), name) for name, number in constants.items()],
    )  # fmt: skip
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    gelu.fuse(model.graph)
    assert [node.op_type for node in model.graph.node].count("Erf") == 1
    made, _ = differentiate(model, ["b"], "loss")
    b = RNG.normal(size=4).astype("float32")
    outputs = run_graph(made, {"x": X, "b": b, "loss_grad": np.float32(1)})
    s = (X + b).astype("float64")
    density = np.exp(-(s**2) / 2) / np.sqrt(2 * np.pi)
    np.testing.assert_allclose(outputs["b_grad"], (s * density).sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ratio", [0.0, 0.5])
def test_the_check_takes_what_is_stopped_for_a_constant(tmp_path: Path, ratio: float) -> None:
    model = with_stops(tmp_path / "model.onnx", ratio)
    graphs = built(model, LOSS)
    batch = MicroBatch({"x": X, "labels": RNG.normal(size=(5, 3)).astype("float32")}, 5)
    checked = trainer_on(graphs, run_file(model, LOSS)).training.checker.gradient.run(batch, 5)
    assert checked is not None
    assert "differences of the loss" in checked.compared
    # With the marks treated as identities, the same gradient is wrong.
    train = onnx.load(graphs.train)
    for node in train.graph.node:
        if stops_gradient(node):
            del node.metadata_props[:]
    onnx.save(train, graphs.train)
    with pytest.raises(UserError, match="disagrees with finite differences of the loss"):
        trainer_on(graphs, run_file(model, LOSS)).training.checker.gradient.run(batch, 5)
