"""Metrics of a quantised model: those of the evaluation graph, from the outputs; and a form that loses too much."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graph_build_models import built, linear, run_graph, save_model, tensors_of, value
from onnx import helper

from ortflow.workflow.data.inputs import MicroBatch
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.types import LOSS_SUM, LOSS_WEIGHT
from ortflow.workflow.onnx_runtime import onnxruntime
from ortflow.workflow.spec.export import ExportSection
from ortflow.workflow.spec.model import ModelSection
from ortflow.workflow.trainer.output_metrics import OutputMetrics
from ortflow.workflow.weights.variants import Judge, write_variants

RANDOM = np.random.default_rng(8)


def ending(path: Path, last: str) -> Path:
    """x w with Softmax, Sigmoid or nothing behind it."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"], name="/matmul")]
    nodes.append(helper.make_node(last, ["h"], ["y"], name="/last"))
    tensors = {"w": RANDOM.normal(size=(4, 3)).astype("float32")}
    return save_model(path, nodes, [value("x", ["batch", 4])], [value("y", ["batch", 3])], tensors)


@pytest.mark.parametrize(
    ("last", "loss", "metrics"),
    [
        ("Identity", {"kind": "cross_entropy"}, ["accuracy", "f1", "auroc", "perplexity"]),
        ("Softmax", {"kind": "cross_entropy"}, ["accuracy", "f1", "auroc"]),
        ("Sigmoid", {"kind": "bce_with_logits"}, ["accuracy"]),
        ("Relu", {"kind": "sum", "terms": [{"loss": {"kind": "mse"}}, {"loss": {"kind": "huber"}}]}, []),
    ],
)
def test_the_metrics_of_the_outputs(last: str, loss: Mapping[str, Any], metrics: list[str], tmp_path: Path) -> None:
    graphs = built(ending(tmp_path / "m.onnx", last), loss, model__metrics=metrics, data__last_batch="pad")
    x = RANDOM.normal(size=(8, 4)).astype("float32")
    labels: Any = RANDOM.integers(0, 3, 8)
    if loss["kind"] != "cross_entropy":
        labels = RANDOM.integers(0, 2, (8, 3)).astype("float32")
    feeds = {"x": x, "labels": labels, **tensors_of(graphs), "ortflow.valid": np.array([6])}
    expected = run_graph(graphs.root / "eval.onnx", feeds)
    section = ModelSection.model_validate({"path": "m.onnx", "loss": dict(loss), "metrics": metrics})
    measure = OutputMetrics(graphs.root / "eval.onnx", section)
    outputs = np.asarray(expected["y"])
    batch = MicroBatch({"x": x, "labels": labels}, 6)
    found = measure.of(["y"], [([outputs], batch)])
    assert found is not None
    assert found["loss"] == pytest.approx(expected[LOSS_SUM] / expected[LOSS_WEIGHT], rel=1e-5)
    if "accuracy" in metrics:
        assert found["accuracy"] == pytest.approx(
            expected["ortflow.accuracy_sum"] / expected["ortflow.accuracy_weight"]
        )
    assert {*metrics} <= {*found}


def test_what_outputs_do_not_determine(tmp_path: Path) -> None:
    graphs = built(linear(tmp_path / "m.onnx"))
    section = ModelSection.model_validate({"path": "m.onnx", "loss": {"kind": "cross_entropy"}})
    batch = MicroBatch({"x": np.zeros((2, 4), "float32"), "labels": np.zeros(2, "int64")}, 2)
    results = [([np.zeros((2, 5), "float32")], batch)]
    assert OutputMetrics(graphs.root / "eval.onnx", section).of(["other"], results) is None


@pytest.mark.filterwarnings("ignore")
def test_a_form_that_loses_too_much_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    model = onnx.load(ending(tmp_path / "m.onnx", "Identity"))
    model.producer_name = "ortflow"
    onnx.save(model, path)
    section = ModelSection.model_validate(
        {"path": "m.onnx", "loss": {"kind": "cross_entropy"}, "metrics": ["accuracy"]}
    )
    graphs = built(tmp_path / "m.onnx", model__metrics=["accuracy"])
    x = RANDOM.normal(size=(400, 4)).astype("float32")
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    labels = session.run(None, {"x": x})[0].argmax(1)
    batches = [MicroBatch({"x": x, "labels": labels}, 400)]
    measure = OutputMetrics(graphs.root / "eval.onnx", section).of

    def form(tolerance: float, metric: str = "accuracy") -> Any:
        export = ExportSection(quantize="int8", quantize_tolerance=1.0, metric_tolerance=tolerance)
        judge = Judge(measure, lambda: batches, metric, metric == "accuracy")
        (found,) = write_variants(path, export, batches, judge)
        return found

    found = form(0.5)
    accuracy, exported = found.metrics["accuracy"]
    assert exported == 1.0
    assert 0.8 < accuracy < 1
    assert f"accuracy {accuracy:.4g} instead of 1" in str(found)
    assert found.to_json()["exported_metrics"]["accuracy"] == 1.0
    found.path.unlink()
    with pytest.raises(
        UserError, match=r"the int8 model has the accuracy 0\.\d+ on real samples, and the exported one 1:"
    ):
        form((1 - accuracy) / 2)
    assert not found.path.exists()
    form(0.5, "loss")
