"""Files of scikit-learn's exporter: operators of ai.onnx.ml beside the network."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from graph_build_models import built, run_graph, save_model, tensors_of, value
from onnx import helper

from ortflow.workflow.errors import UserError

CLASSICAL = "ai.onnx.ml"
RNG = np.random.default_rng(3)
X = RNG.normal(size=(6, 4)).astype("float32")
LAYERS = {
    "w": RNG.normal(size=(4, 3)).astype("float32"),
    "b": RNG.normal(size=3).astype("float32"),
    "v": RNG.normal(size=(3, 1)).astype("float32"),
}
SCALER = helper.make_node("Scaler", ["x"], ["scaled"], "Scaler", domain=CLASSICAL, offset=[1.0] * 4, scale=[2.0] * 4)


def network(first: str, last: str) -> list[onnx.NodeProto]:
    return [
        helper.make_node("MatMul", [first, "w"], ["xw"], "MatMul"),
        helper.make_node("Add", ["xw", "b"], ["h"], "Add"),
        helper.make_node("Tanh", ["h"], ["t"], "Tanh"),
        helper.make_node("MatMul", ["t", "v"], [last], "MatMul1"),
    ]


def saved(path: Path, nodes: list[onnx.NodeProto], outputs: list[onnx.ValueInfoProto], **more: np.ndarray) -> Path:
    save_model(path, nodes, [value("x", ["n", 4])], outputs, {**LAYERS, **more})
    model = onnx.load(path)
    model.opset_import.append(helper.make_opsetid(CLASSICAL, 1))
    onnx.save(model, path)
    return path


def test_scaled_features_and_the_name_of_the_class_stay_in_the_file(tmp_path: Path) -> None:
    """A binary MLPClassifier in a pipeline: its class is looked up, and its loss reads the logit."""
    nodes = [
        SCALER,
        *network("scaled", "z"),
        helper.make_node("Sigmoid", ["z"], ["second"], "Sigmoid"),
        helper.make_node("Sub", ["one", "second"], ["first"], "Sub"),
        helper.make_node("Concat", ["first", "second"], ["probabilities"], "Concat", axis=1),
        helper.make_node("ArgMax", ["probabilities"], ["best"], "ArgMax", axis=1),
        helper.make_node("ArrayFeatureExtractor", ["classes", "best"], ["label"], "Look", domain=CLASSICAL),
    ]
    outputs = [value("label", [1, "n"], "int64"), value("probabilities", ["n", 2])]
    more = {"one": np.ones(1, "float32"), "classes": np.array([7, 9])}
    path = saved(tmp_path / "m.onnx", nodes, outputs, **more)
    graphs = built(path, {"kind": "cross_entropy", "output": "probabilities"})
    labels = np.array([0, 1, 1, 0, 1, 0])
    train = run_graph(graphs.train, {"x": X, "labels": labels, **tensors_of(graphs)})
    hidden = np.tanh((X.astype("float64") - 1) * 2 @ LAYERS["w"] + LAYERS["b"])
    z = (hidden @ LAYERS["v"])[:, 0]
    np.testing.assert_allclose(train["ortflow.loss_sum"], np.logaddexp(0, np.where(labels, -z, z)).sum(), 1e-5)
    slope = 1 / (1 + np.exp(-z)) - labels
    np.testing.assert_allclose(train["v_grad"][:, 0], slope @ hidden, 1e-4, 1e-5)
    exported = [node.op_type for node in onnx.load(graphs.infer).graph.node if node.domain == CLASSICAL]
    assert exported == ["Scaler", "ArrayFeatureExtractor"]


def test_none_of_them_has_a_gradient(tmp_path: Path) -> None:
    nodes = [*network("x", "z"), helper.make_node("Normalizer", ["z"], ["y"], "Norm", domain=CLASSICAL, norm="L2")]
    path = saved(tmp_path / "m.onnx", nodes, [value("y", ["n", 1])])
    with pytest.raises(UserError, match=r"'Norm' \(ai.onnx.ml.Normalizer\) has no gradient"):
        built(path, {"kind": "mse"})
