"""Gradients of whole graphs: random ones, and those that a run is built of."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from gradients import TRAINING_KERNELS
from graph_build_models import Array, built, kept_child, linear, run_graph, tensors_of
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from random_graphs import RandomGraph

from ortflow.workflow.graph import build, expand
from ortflow.workflow.graph.differentiator import Builder, Rules
from ortflow.workflow.graph.fusions import avoid_wrong_products
from ortflow.workflow.graph.lower import prepare
from ortflow.workflow.graph.types import GraphSet, with_kernels_of
from ortflow.workflow.kernels.library import find_library

STEP = 1e-6
LIBRARY = find_library()
needs_builder = pytest.mark.skipif(not TRAINING_KERNELS, reason="the training package is not installed")


class Erf(OpRun):
    """onnx's own computes in single precision."""

    def _run(self, x: Any) -> tuple[Any]:  # type: ignore[override]
        return (np.vectorize(math.erf)(x),)


def with_loss(graph: RandomGraph) -> onnx.ModelProto:
    """The graph prepared, its weights inputs, with the sum of each output's mean square as its only output."""
    model = graph.model()
    means = []
    for i, output in enumerate(model.graph.output):
        square, mean = f"square{i}", f"mean{i}"
        model.graph.node.append(helper.make_node("Mul", [output.name, output.name], [square], square))
        model.graph.node.append(helper.make_node("ReduceMean", [square], [mean], mean, keepdims=0))
        means.append(mean)
    model.graph.node.append(helper.make_node("Sum", means, ["loss"], "loss"))
    del model.graph.output[:]
    model.graph.output.append(helper.make_tensor_value_info("loss", TensorProto.FLOAT, []))
    prepared, _ = prepare(model)
    avoid_wrong_products(prepared)
    kept = [onnx.TensorProto.FromString(t.SerializeToString()) for t in prepared.graph.initializer]
    del prepared.graph.initializer[:]
    for tensor in kept:
        if tensor.name in graph.weights:
            prepared.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
        else:
            prepared.graph.initializer.append(tensor)
    return prepared


def gradients(
    model: onnx.ModelProto,
    differentiator: Builder | Rules,
    feeds: Mapping[str, Array],
    weights: Sequence[str],
    monkeypatch: pytest.MonkeyPatch,
) -> dict[str, Array]:
    monkeypatch.setattr(expand, "differentiator", lambda: differentiator)
    forward, _ = expand.make_differentiable(model, weights, "loss")
    made, reached = differentiator.gradient(kept_child(), forward, "loss", weights)
    found = run_graph(differentiator.finish(made), feeds)
    return {name: found[f"{name}_grad"] for name in reached}


def slope(model: onnx.ModelProto, feeds: Mapping[str, Array], along: Mapping[str, Array]) -> float:
    """The derivative of the loss along a direction, by a central difference in double precision."""
    double = onnx.ModelProto()
    double.CopyFrom(model)
    for tensor in double.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype("float64"), tensor.name))
    for value in (*double.graph.input, *double.graph.output):
        value.type.tensor_type.elem_type = TensorProto.DOUBLE
    evaluator = ReferenceEvaluator(double, new_ops=[Erf])

    def loss(step: float) -> float:
        given = {v.name: feeds[v.name].astype("float64") + step * along.get(v.name, 0) for v in double.graph.input}
        return float(evaluator.run(["loss"], given)[0])

    return (loss(STEP) - loss(-STEP)) / (2 * STEP)


@pytest.mark.parametrize("seed", range(80))
def test_random_graph(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = RandomGraph(seed)
    model = with_loss(graph)
    weights = [value.name for value in model.graph.input if value.name in graph.weights]
    if not weights:
        return
    feeds = {**graph.feeds, **graph.weights}
    found = gradients(model, Rules(), feeds, weights, monkeypatch)
    random = np.random.default_rng(seed)
    along = {name: random.normal(size=feeds[name].shape) for name in found}
    parts = [(found[name] * along[name]).astype("float64") for name in found]
    size = sum(float(np.abs(part).sum()) for part in parts)
    assert sum(float(part.sum()) for part in parts) == pytest.approx(
        slope(model, feeds, along), rel=1e-4, abs=1e-4 * size + 1e-7
    )
    if TRAINING_KERNELS:
        expected = gradients(model, Builder(), feeds, weights, monkeypatch)
        assert list(found) == list(expected)
        largest = max(float(np.abs(array).max()) for array in expected.values())
        for name, array in expected.items():
            np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-5 * np.abs(array).max() + 1e-6 * largest)


@pytest.mark.parametrize("seed", range(40))
def test_random_graph_of_unknown_sizes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is known of its inputs' sizes, a graph's gradients are the same."""
    graph = RandomGraph(seed)
    model = with_loss(graph)
    weights = [value.name for value in model.graph.input if value.name in graph.weights]
    if not weights or any(node.op_type == "Conv" and set(node.input) & set(graph.feeds) for node in model.graph.node):
        return
    feeds = {**graph.feeds, **graph.weights}
    expected = gradients(model, Rules(), feeds, weights, monkeypatch)
    random = np.random.default_rng(seed)
    for value in model.graph.input:
        if value.name in graph.feeds:
            for dim in value.type.tensor_type.shape.dim:
                # Axes of one name are of one size.
                name = [f"size{dim.dim_value}", f"own{random.integers(10**9)}", ""][random.integers(3)]
                dim.Clear()
                dim.dim_param = name
    del model.graph.value_info[:]
    found = gradients(model, Rules(), feeds, weights, monkeypatch)
    assert list(found) == list(expected)
    largest = max(float(np.abs(array).max()) for array in expected.values())
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-5 * np.abs(array).max() + 1e-6 * largest)


def built_by(
    differentiator: Builder | Rules, model: Path, loss: Mapping[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> GraphSet:
    folder = model.parent / type(differentiator).__name__
    folder.mkdir()
    copy = folder / "model.onnx"
    copy.write_bytes(model.read_bytes())
    monkeypatch.setattr(expand, "differentiator", lambda: differentiator)
    monkeypatch.setattr(build, "differentiator", lambda: differentiator)
    return built(copy, loss)


def assert_same(
    model: Path, loss: Mapping[str, Any] | None, feeds: Mapping[str, Array], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rules' training graph computes what the builder's does, with and without our kernels."""
    sets = [built_by(each, model, loss, monkeypatch) for each in (Builder(), Rules())]
    given = {**tensors_of(sets[0]), **feeds}
    expected = run_graph(sets[0].train, given)
    libraries = [None] if LIBRARY.path is None else [None, LIBRARY.path]
    for library in libraries:
        graph = sets[1].train if library is None else with_kernels_of(sets[1].train)
        found = run_graph(graph, given, kernels=library)
        assert set(found) == set(expected)
        largest = max(float(np.abs(array).max()) for name, array in expected.items() if name.endswith("_grad"))
        for name, array in expected.items():
            atol = 1e-5 * np.abs(array).max() + 1e-6 * largest
            np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=atol, err_msg=name)


@needs_builder
@pytest.mark.parametrize(
    ("loss", "out", "label"),
    [
        ({"kind": "cross_entropy"}, ("batch", 5), np.array([0, 4, 1])),
        ({"kind": "cross_entropy", "label_smoothing": 0.1}, ("batch", 5), np.array([0, 4, -100])),
        ({"kind": "cross_entropy", "class_axis": -1}, ("batch", 2, 5), np.array([[0, 4], [1, 1], [2, -100]])),
        ({"kind": "cross_entropy", "class_axis": 1}, ("batch", 5, 2), np.array([[0, 4], [1, 1], [2, -100]])),
        ({"kind": "mse"}, ("batch", 5), np.ones((3, 5), "float32")),
        ({"kind": "l1"}, ("batch", 5), np.ones((3, 5), "float32")),
        ({"kind": "bce_with_logits"}, ("batch", 5), np.ones((3, 5), "float32")),
    ],
    ids=str,
)
def test_losses(
    loss: dict[str, Any], out: tuple[int | str, ...], label: Array, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = np.random.default_rng(0).normal(size=(3, 4)).astype("float32")
    model = linear(tmp_path / "model.onnx", out=out)
    name = loss.get("label", "labels")
    assert_same(model, loss, {"x": x, name: label}, monkeypatch)


@needs_builder
def test_a_transformer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples" / "gpt"))
    monkeypatch.delitem(sys.modules, "model", raising=False)
    import model

    path = tmp_path / "model.onnx"
    onnx.save(model.build(model.Config(layers=2, width=64, heads=4, context=32, dropout=0.0)), path)
    monkeypatch.delitem(sys.modules, "model", raising=False)
    random = np.random.default_rng(0)
    feeds = {name: random.integers(0, 256, (4, 32)) for name in ("tokens", "labels")}
    assert_same(path, None, feeds, monkeypatch)
