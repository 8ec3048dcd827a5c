"""Our graphs compute the same after ONNX Runtime's optimiser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graph_build_models import built, run_graph, save_model, tensors_of, value
from onnx import helper
from random_graphs import RandomGraph

from ortflow.workflow.graph.export.inference import export_inference
from ortflow.workflow.graph.normalize.fusions import avoid_wrong_forms, avoid_wrong_normalizations
from ortflow.workflow.graph.normalize.prepare import prepare
from ortflow.workflow.onnx_runtime import native as runtime
from ortflow.workflow.onnx_runtime import onnxruntime as ort

ort.set_default_logger_severity(4)
GRAPHS = 300
Level = ort.GraphOptimizationLevel
RNG = np.random.default_rng(8)


def computed(model: onnx.ModelProto, feeds: dict[str, np.ndarray], level: Level) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [np.asarray(result, np.float64) for result in session.run(None, feeds)]


def brought_to_form(model: onnx.ModelProto) -> onnx.ModelProto:
    prepared = prepare(model)[0]
    avoid_wrong_forms(prepared)
    avoid_wrong_normalizations(prepared)
    return prepared


def wrong(optimised: onnx.ModelProto, graph: RandomGraph) -> bool:
    exact = computed(graph.model(), graph.feeds, Level.ORT_DISABLE_ALL)
    try:
        found = computed(optimised, graph.feeds, Level.ORT_ENABLE_ALL)
    except (runtime.Fail, runtime.InvalidArgument, runtime.RuntimeException):
        return True
    return not all(
        a.shape == b.shape and np.allclose(a, b, rtol=0, atol=1e-3 * (0.1 + np.abs(b).max(initial=0)))
        for a, b in zip(found, exact, strict=True)
    )


def test_all_optimisations_compute_what_none_do() -> None:
    graphs = [(seed, RandomGraph(seed)) for seed in range(GRAPHS)]
    graphs = [(seed, graph) for seed, graph in graphs if graph.nodes]
    assert len(graphs) > GRAPHS * 0.9
    assert [seed for seed, graph in graphs if wrong(brought_to_form(graph.model()), graph)] == []


def test_the_forms_are_needed() -> None:
    """If this fails, ONNX Runtime's optimiser is right, and the module can be removed."""
    graphs = [RandomGraph(seed) for seed in range(80)]
    assert any(wrong(graph.model(), graph) for graph in graphs if graph.nodes)


def test_the_unusual_forms_alone_change() -> None:
    """A graph without them is unchanged."""
    nodes = [
        helper.make_node("Transpose", ["w"], ["t"], perm=[1, 0]),
        helper.make_node("MatMul", ["x", "t"], ["h"]),
        helper.make_node("BatchNormalization", ["h", "s", "b", "m", "v"], ["y"]),
    ]
    tensors = {"w": RNG.normal(size=(3, 4)), "s": np.ones(3), "b": np.zeros(3), "m": np.zeros(3), "v": np.ones(3)}
    graph = helper.make_graph(
        nodes,
        "usual",
        [value("x", ["n", 4])],
        [value("y", ["n", 3])],
        [onnx.numpy_helper.from_array(a.astype(np.float32), n) for n, a in tensors.items()],
    )
    model = prepare(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8))[0]
    before = model.SerializeToString()
    avoid_wrong_forms(model)
    avoid_wrong_normalizations(model)
    assert model.SerializeToString() == before


def spectral(path: Path) -> Path:
    """y = x w / |w^T u|: a transposed weight times a vector, as in spectral normalisation."""
    nodes = [
        helper.make_node("Transpose", ["w"], ["wt"], perm=[1, 0], name="/turn"),
        helper.make_node("MatMul", ["wt", "u"], ["v"], name="/vector"),
        helper.make_node("ReduceL2", ["v"], ["norm"], name="/norm"),
        helper.make_node("Div", ["w", "norm"], ["scaled"], name="/scale"),
        helper.make_node("MatMul", ["x", "scaled"], ["y"], name="/matmul"),
    ]
    tensors = {"w": RNG.normal(size=(4, 6)).astype(np.float32), "u": RNG.normal(size=4).astype(np.float32)}
    return save_model(path, nodes, [value("x", ["batch", 4])], [value("y", ["batch", 6])], tensors)


def unmoved(path: Path) -> Path:
    """A Transpose that changes nothing, before a Gemm."""
    nodes = [
        helper.make_node("Transpose", ["w"], ["same"], perm=[0, 1], name="/turn"),
        helper.make_node("Gemm", ["x", "same", "b"], ["y"], name="/gemm"),
    ]
    tensors = {"w": RNG.normal(size=(4, 4)).astype(np.float32), "b": RNG.normal(size=4).astype(np.float32)}
    return save_model(path, nodes, [value("x", ["batch", 4])], [value("y", ["batch", 4])], tensors)


def turned_norm(path: Path) -> Path:
    """BatchNormalization over the columns of a product in another order."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="/matmul"),
        helper.make_node("Reshape", ["h", "square"], ["r"], name="/open"),
        helper.make_node("Transpose", ["r"], ["t"], perm=[0, 2, 1], name="/turn"),
        helper.make_node("Reshape", ["t", "flat"], ["f"], name="/flat"),
        helper.make_node("BatchNormalization", ["f", "s", "b", "m", "v"], ["y"], name="/norm", epsilon=1e-5),
    ]
    tensors = {name: RNG.normal(size=4).astype(np.float32) for name in ("s", "b", "m")}
    tensors |= {"w": RNG.normal(size=(4, 4)).astype(np.float32), "v": RNG.uniform(1, 2, 4).astype(np.float32)}
    tensors |= {"square": np.array([-1, 2, 2]), "flat": np.array([-1, 4])}
    return save_model(path, nodes, [value("x", ["batch", 4])], [value("y", ["batch", 4])], tensors)


def pooled(path: Path, operator: str, between: str = "", *, value_given: bool = True, number: float = 0.0) -> Path:
    """Zeros, or another number, around an image of numbers below zero, then a pooling: the padding counts."""
    inputs = ["x4", "around", "nothing"] if value_given else ["x4", "around"]
    nodes = [
        helper.make_node("Reshape", ["x", "image"], ["x4"], name="/image"),
        helper.make_node("Pad", inputs, ["padded"], name="/pad"),
        *([helper.make_node(between, ["padded"], ["same"], name="/between")] if between else []),
        helper.make_node(
            operator, ["same" if between else "padded"], ["p"], kernel_shape=[2, 2], pads=[0] * 4, name="/pool"
        ),
        helper.make_node("Reshape", ["p", "row"], ["h"], name="/row"),
        helper.make_node("MatMul", ["h", "w"], ["y"], name="/matmul"),
    ]
    tensors = {
        "image": np.array([-1, 1, 2, 2]),
        "around": np.array([0, 0, 1, 1, 0, 0, 1, 1]),
        "row": np.array([-1, 9]),
        "nothing": np.float32(number),
        "w": RNG.normal(size=(9, 4)).astype(np.float32),
    }
    return save_model(path, nodes, [value("x", ["batch", 4])], [value("y", ["batch", 4])], tensors)


def test_zeros_around_a_pooling_count(tmp_path: Path) -> None:
    """Pad_Fusion moved them into the pooling's pads, which do not count: the maximum was below zero."""
    x = -1 - RNG.random((4, 4)).astype(np.float32)
    for number, (operator, between, given) in enumerate(
        (("MaxPool", "", True), ("MaxPool", "", False), ("MaxPool", "Identity", True), ("AveragePool", "", True))
    ):
        path = pooled(tmp_path / f"{number}.onnx", operator, between, value_given=given)
        check_agreement(path, x, tmp_path)


@pytest.mark.parametrize("operator", ["MaxPool", "AveragePool"])
@pytest.mark.parametrize("number", [-1.5, 2.0])
def test_another_number_around_a_pooling_stays(operator: str, number: float, tmp_path: Path) -> None:
    """Only zeros are written anew; Pad_Fusion leaves other numbers alone."""
    path = pooled(tmp_path / "model.onnx", operator, number=number)
    check_agreement(path, -1 - RNG.random((4, 4)).astype(np.float32), tmp_path)


def test_pads_of_a_dilated_convolution_are_numbers(tmp_path: Path) -> None:
    """No ONNX Runtime supports auto_pad SAME with dilations."""
    image, row = np.array([-1, 1, 2, 2]), np.array([-1, 4])
    weight = RNG.normal(size=(1, 1, 3, 3)).astype(np.float32)

    def model(path: Path, **pads: Any) -> Path:
        nodes = [
            helper.make_node("Reshape", ["x", "image"], ["x4"], name="/image"),
            helper.make_node("Conv", ["x4", "w"], ["c"], kernel_shape=[3, 3], dilations=[2, 2], name="/conv", **pads),
            helper.make_node("MaxPool", ["c"], ["p"], kernel_shape=[3, 3], dilations=[2, 2], name="/pool", **pads),
            helper.make_node("Reshape", ["p", "row"], ["y"], name="/row"),
        ]
        tensors = {"image": image, "w": weight, "row": row}
        return save_model(path, nodes, [value("x", ["batch", 4])], [value("y", ["batch", 4])], tensors)

    x = RNG.normal(size=(4, 4)).astype(np.float32)
    check_agreement(
        model(tmp_path / "same.onnx", auto_pad="SAME_UPPER"), x, tmp_path, model(tmp_path / "n.onnx", pads=[2] * 4)
    )


@pytest.mark.parametrize("make", [spectral, unmoved, turned_norm])
def test_training_evaluation_and_export_agree_with_the_model(make, tmp_path: Path) -> None:
    x = RNG.normal(size=(4, 4)).astype(np.float32)
    # Batch normalisation trains with the batch's statistics.
    check_agreement(make(tmp_path / "m.onnx"), x, tmp_path, trains=make is not turned_norm)


def check_agreement(
    path: Path, x: np.ndarray, folder: Path, reference: Path | None = None, *, trains: bool = True
) -> None:
    """Training, evaluation and exported graph compute the same as the unchanged model or the reference."""
    graphs = built(path, {"kind": "mse"})
    (exact,) = computed(onnx.load(reference or path), {"x": x}, Level.ORT_DISABLE_ALL)
    feeds = {"x": x, "labels": np.zeros(exact.shape, np.float32), **tensors_of(graphs)}
    np.testing.assert_allclose(run_graph(graphs.eval, feeds)["y"], exact, rtol=1e-5, atol=1e-5)
    if trains:
        trained = run_graph(graphs.train, feeds)
        np.testing.assert_allclose(
            trained["ortflow.loss_sum"] / trained["ortflow.loss_weight"], (exact**2).mean(), 1e-5
        )
    export_inference(graphs.infer, tensors_of(graphs), folder / "out.onnx")
    np.testing.assert_allclose(run_graph(folder / "out.onnx", {"x": x})["y"], exact, rtol=1e-5, atol=1e-5)
