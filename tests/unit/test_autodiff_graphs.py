"""Gradients of random graphs, against finite differences in double precision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import pytest
from graph_build_models import Array, run_graph
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from precise_operators import Erf
from random_graphs import RandomGraph

from ortflow.workflow.graph.autodiff.compose import compose
from ortflow.workflow.graph.autodiff.expand import make_differentiable
from ortflow.workflow.graph.autodiff.reverse import differentiate
from ortflow.workflow.graph.normalize.fusions import avoid_wrong_forms
from ortflow.workflow.graph.normalize.prepare import prepare

STEP = 1e-6


def with_loss(graph: RandomGraph) -> onnx.ModelProto:
    """The prepared graph, with its weights as inputs and the sum of each output's mean square as its only output."""
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
    avoid_wrong_forms(prepared)
    kept = [onnx.TensorProto.FromString(t.SerializeToString()) for t in prepared.graph.initializer]
    del prepared.graph.initializer[:]
    for tensor in kept:
        if tensor.name in graph.weights:
            prepared.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
        else:
            prepared.graph.initializer.append(tensor)
    return prepared


def gradients(model: onnx.ModelProto, feeds: Mapping[str, Array], weights: Sequence[str]) -> dict[str, Array]:
    forward, _ = make_differentiable(model, weights, "loss")
    made, reached = differentiate(forward, weights, "loss")
    found = run_graph(compose(made), feeds)
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
def test_random_graph(seed: int) -> None:
    graph = RandomGraph(seed)
    model = with_loss(graph)
    weights = [value.name for value in model.graph.input if value.name in graph.weights]
    if not weights:
        return
    feeds = {**graph.feeds, **graph.weights}
    found = gradients(model, feeds, weights)
    random = np.random.default_rng(seed)
    along = {name: random.normal(size=feeds[name].shape) for name in found}
    parts = {name: (found[name] * along[name]).astype("float64") for name in found}
    size = sum(float(np.abs(part).sum()) for part in parts.values())
    for name, part in parts.items():
        expected = slope(model, feeds, {name: along[name]})
        assert float(part.sum()) == pytest.approx(expected, rel=1e-4, abs=1e-4 * size + 1e-7), name


@pytest.mark.parametrize("seed", range(40))
def test_random_graph_of_unknown_sizes(seed: int) -> None:
    """A graph's gradients do not depend on what is known about its inputs' sizes."""
    graph = RandomGraph(seed)
    model = with_loss(graph)
    weights = [value.name for value in model.graph.input if value.name in graph.weights]
    if not weights or any(node.op_type == "Conv" and set(node.input) & set(graph.feeds) for node in model.graph.node):
        return
    feeds = {**graph.feeds, **graph.weights}
    expected = gradients(model, feeds, weights)
    random = np.random.default_rng(seed)
    for value in model.graph.input:
        if value.name in graph.feeds:
            for dim in value.type.tensor_type.shape.dim:
                # Axes of the same name have the same size.
                name = [f"size{dim.dim_value}", f"own{random.integers(10**9)}", ""][random.integers(3)]
                dim.Clear()
                dim.dim_param = name
    del model.graph.value_info[:]
    found = gradients(model, feeds, weights)
    assert list(found) == list(expected)
    largest = max(float(np.abs(array).max()) for array in expected.values())
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-5 * np.abs(array).max() + 1e-6 * largest)
