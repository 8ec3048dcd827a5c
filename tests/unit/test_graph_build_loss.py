"""Each loss and metric against numpy in double precision: values, weights, and gradients by finite differences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graph_build_models import Array, built, linear, numeric_gradient, run_graph, save_model, tensors_of, value
from onnx import TensorProto, helper

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.objective.vocabulary import table_bounds

BATCH = 6
RNG = np.random.default_rng(7)
X = RNG.normal(size=(BATCH, 4)).astype("float32")


def log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def cross_entropy(logits: Array, labels: Array, ignore: int = -100, smoothing: float = 0.0) -> tuple[float, int]:
    """Sum and count; the classes on the last axis."""
    logs, flat = log_softmax(logits).reshape(-1, logits.shape[-1]), labels.reshape(-1)
    counted = flat != ignore
    picked = logs[np.arange(flat.size), np.where(counted, flat, 0)]
    each = -(1 - smoothing) * picked - smoothing * logs.mean(-1)
    return float(each[counted].sum()), int(counted.sum())


def forward(w: Array, b: Array, shape: tuple[int, ...], x: Array = X) -> Array:
    return (x.astype("float64") @ w + b).reshape(len(x), *shape)


def close(actual: Array, expected: Any, tolerance: float = 2e-6) -> None:
    expected = np.asarray(expected, "float64")
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance * max(1.0, np.abs(expected).max()))


@pytest.mark.parametrize(
    ("shape", "axis", "ignore", "smoothing"),
    [
        ((5,), -1, -100, 0.0),
        ((5,), 1, 2, 0.1),
        ((3, 5), -1, -100, 0.0),
        ((3, 5), -1, 0, 0.2),
        ((5, 3), 1, -100, 0.0),
        ((5, 3, 2), 1, 4, 0.1),
        ((3, 5, 2), 2, -100, 0.1),
    ],
)
def test_cross_entropy(tmp_path: Path, shape: tuple[int, ...], axis: int, ignore: int, smoothing: float) -> None:
    loss = {"kind": "cross_entropy", "class_axis": axis, "ignore_index": ignore, "label_smoothing": smoothing}
    graphs = built(linear(tmp_path / "m.onnx", out=("batch", *shape)), loss, model__metrics=["accuracy"])
    full = (BATCH, *shape)
    labels = RNG.integers(0, 5, [d for i, d in enumerate(full) if i != axis % len(full)])
    labels.reshape(-1)[::3] = ignore
    tensors = tensors_of(graphs)

    def reference(w: Array, b: Array) -> tuple[float, int]:
        return cross_entropy(np.moveaxis(forward(w, b, shape), axis, -1), labels, ignore, smoothing)

    feeds = {"x": X, "labels": labels, **tensors}
    train, evaluation = run_graph(graphs.train, feeds), run_graph(graphs.eval, feeds)
    total, count = reference(tensors["w"], tensors["b"])
    for outputs in (train, evaluation):
        close(outputs["ortflow.loss_sum"], total)
        assert outputs["ortflow.loss_weight"] == count
    w, b = (tensors[name].astype("float64") for name in "wb")
    close(train["w_grad"], numeric_gradient(lambda w: reference(w, b)[0], w), 1e-5)
    close(train["b_grad"], numeric_gradient(lambda b: reference(w, b)[0], b), 1e-5)
    best = np.moveaxis(forward(w, b, shape), axis, -1).argmax(-1)
    assert evaluation["ortflow.accuracy_sum"] == ((best == labels) & (labels != ignore)).sum()
    assert evaluation["ortflow.accuracy_weight"] == count
    assert graphs.vocabulary["labels"] == 5


@pytest.mark.parametrize("kind", ["mse", "l1", "bce_with_logits"])
def test_elementwise(tmp_path: Path, kind: str) -> None:
    graphs = built(linear(tmp_path / "m.onnx", out=("batch", 3, 2)), {"kind": kind, "label": "target"})
    tensors = tensors_of(graphs)
    target = RNG.random(size=(BATCH, 3, 2)).astype("float32")

    def reference(w: Array, b: Array) -> float:
        z = forward(w, b, (3, 2))
        if kind == "bce_with_logits":
            return float((np.logaddexp(0, z) - z * target).sum())
        return float(((z - target) ** 2).sum() if kind == "mse" else np.abs(z - target).sum())

    feeds = {"x": X, "target": target, **tensors}
    train, evaluation = run_graph(graphs.train, feeds), run_graph(graphs.eval, feeds)
    for outputs in (train, evaluation):
        close(outputs["ortflow.loss_sum"], reference(tensors["w"], tensors["b"]))
        assert outputs["ortflow.loss_weight"] == target.size
    w, b = (tensors[name].astype("float64") for name in "wb")
    close(train["w_grad"], numeric_gradient(lambda w: reference(w, b), w), 1e-5)
    close(train["b_grad"], numeric_gradient(lambda b: reference(w, b), b), 1e-5)
    assert graphs.inputs[-1].shape == (None, 3, 2)
    assert graphs.inputs[-1].role == "label"


@pytest.mark.parametrize("kind", ["cross_entropy", "bce_with_logits"])
def test_stable_for_large_logits(tmp_path: Path, kind: str) -> None:
    graphs = built(linear(tmp_path / "m.onnx", out=("batch", 2)), {"kind": kind})
    tensors = {name: array * 0 for name, array in tensors_of(graphs).items()}
    tensors["b"][:] = [3e4, -3e4]
    labels = np.ones(BATCH, "int64") if kind == "cross_entropy" else np.tile(np.float32([0, 1]), (BATCH, 1))
    train = run_graph(graphs.train, {"x": X, "labels": labels, **tensors})
    close(train["ortflow.loss_sum"], BATCH * 6e4)
    close(train["b_grad"], [BATCH, -BATCH])


def test_bce_gradient_at_zero(tmp_path: Path) -> None:
    """A last layer that starts at zero: the derivatives of |x| and max(x, 0) there must have no effect."""
    graphs = built(linear(tmp_path / "m.onnx", out=("batch", 2)), {"kind": "bce_with_logits"})
    tensors = {name: array * 0 for name, array in tensors_of(graphs).items()}
    target = np.tile(np.float32([0, 1]), (BATCH, 1))
    train = run_graph(graphs.train, {"x": X, "labels": target, **tensors})
    close(train["b_grad"], [BATCH / 2, -BATCH / 2])


def test_bce_accuracy(tmp_path: Path) -> None:
    graphs = built(
        linear(tmp_path / "m.onnx", out=("batch", 3)), {"kind": "bce_with_logits"}, model__metrics=["accuracy"]
    )
    tensors = tensors_of(graphs)
    target = RNG.integers(0, 2, (BATCH, 3)).astype("float32")
    outputs = run_graph(graphs.eval, {"x": X, "labels": target, **tensors})
    right = (forward(tensors["w"], tensors["b"], (3,)) > 0) == (target > 0.5)
    assert outputs["ortflow.accuracy_sum"] == right.sum()
    assert outputs["ortflow.accuracy_weight"] == right.size


def test_loss_of_the_graphs_own(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["z"]),
        helper.make_node("Sub", ["z", "y"], ["d"]),
        helper.make_node("Mul", ["d", "d"], ["dd"]),
        helper.make_node("ReduceMean", ["dd"], ["mean"], keepdims=0),
    ]
    w = RNG.normal(size=(4, 2)).astype("float32")
    path = save_model(
        tmp_path / "m.onnx",
        nodes,
        [value("x", ["batch", 4]), value("y", ["batch", 2])],
        [value("mean", []), value("z", ["batch", 2])],
        {"w": w},
    )
    graphs = built(path, {"kind": "output", "output": "mean"}, model__labels=["y"])
    y = RNG.normal(size=(BATCH, 2)).astype("float32")
    train = run_graph(graphs.train, {"x": X, "y": y, **tensors_of(graphs)})

    def reference(w: Array) -> float:
        return float(((X @ w - y) ** 2).mean() * BATCH)

    close(train["ortflow.loss_sum"], reference(w))
    assert train["ortflow.loss_weight"] == BATCH
    close(train["w_grad"], numeric_gradient(reference, w), 1e-5)
    assert [(i.name, i.role) for i in graphs.inputs] == [("x", "data"), ("y", "label")]


@pytest.mark.parametrize("kind", ["cross_entropy", "mse", "l1", "bce_with_logits"])
def test_padding_weighs_nothing(tmp_path: Path, kind: str) -> None:
    """The first rows of a padded batch give the same as alone, whatever the others contain."""
    metrics = ["accuracy"] if kind in ("cross_entropy", "bce_with_logits") else []
    graphs = built(
        linear(tmp_path / "m.onnx", out=("batch", 3, 5)),
        {"kind": kind},
        data__last_batch="pad",
        model__metrics=metrics,
    )
    tensors = tensors_of(graphs)
    classes = kind == "cross_entropy"
    labels = RNG.integers(0, 5, (BATCH, 3)) if classes else RNG.random(size=(BATCH, 3, 5)).astype("float32")
    for path in (graphs.train, graphs.eval):
        alone = {"x": X[:4], "labels": labels[:4], "ortflow.valid": np.array([4]), **tensors}
        padded = {"x": X, "labels": labels, "ortflow.valid": np.array([4]), **tensors}
        expected, actual = run_graph(path, alone), run_graph(path, padded)
        assert actual["ortflow.loss_weight"] == (12 if classes else 60)
        for name, array in expected.items():
            close(actual[name][:4] if name == "y" else actual[name], array, 1e-6)
    assert graphs.padded


def test_all_labels_ignored(tmp_path: Path) -> None:
    graphs = built(linear(tmp_path / "m.onnx"))
    labels = np.full(BATCH, -100)
    train = run_graph(graphs.train, {"x": X, "labels": labels, **tensors_of(graphs)})
    assert train["ortflow.loss_sum"] == 0
    assert train["ortflow.loss_weight"] == 0
    assert not train["w_grad"].any()


def model_with_labels(path: Path, *, read: bool, dtype: str = "int64") -> Path:
    """Logits, and the model's own loss output; the logits may read the labels."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["plain"]),
        helper.make_node("Cast", ["labels"], ["labels64"], to=7),
        helper.make_node("Cast", ["labels"], ["real"], to=1),
        helper.make_node("ReduceSum", ["real"], ["shift"], keepdims=0),
        helper.make_node("Add" if read else "Identity", ["plain", "shift"] if read else ["plain"], ["logits"]),
        helper.make_node("SoftmaxCrossEntropyLoss", ["logits", "labels64"], ["loss"]),
    ]
    return save_model(
        path,
        nodes,
        [value("x", ["batch", 4]), value("labels", ["batch"], dtype)],
        [value("loss", []), value("logits", ["batch", 5])],
        {"w": RNG.normal(size=(4, 5)).astype("float32")},
    )


@pytest.mark.parametrize("dtype", ["int64", "int32"])
def test_label_input_that_the_model_has(tmp_path: Path, dtype: str) -> None:
    path = model_with_labels(tmp_path / "m.onnx", read=False, dtype=dtype)
    graphs = built(path, {"kind": "cross_entropy", "output": "logits"})
    assert [(i.name, i.dtype, i.role) for i in graphs.inputs] == [("x", "float32", "data"), ("labels", dtype, "label")]
    labels = RNG.integers(0, 5, BATCH).astype(dtype)
    tensors = tensors_of(graphs)
    train = run_graph(graphs.train, {"x": X, "labels": labels, **tensors})
    close(train["ortflow.loss_sum"], cross_entropy(X @ tensors["w"], labels)[0])


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8", "bool", "float32"])
def test_truths_that_the_model_has_as_input(tmp_path: Path, dtype: str) -> None:
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    path = save_model(
        tmp_path / "m.onnx",
        [helper.make_node("MatMul", ["x", "w"], ["logits"]), helper.make_node("Cast", ["labels"], ["unused"], to=1)],
        [value("x", ["batch", 4]), helper.make_tensor_value_info("labels", kind, ["batch", 5])],
        [value("logits", ["batch", 5])],
        {"w": RNG.normal(size=(4, 5)).astype("float32")},
    )
    graphs = built(path, {"kind": "bce_with_logits"})
    assert [(i.name, i.dtype) for i in graphs.inputs] == [("x", "float32"), ("labels", dtype)]
    labels = RNG.integers(0, 2, (BATCH, 5)).astype(dtype)
    tensors = tensors_of(graphs)
    train = run_graph(graphs.train, {"x": X, "labels": labels, **tensors})
    logits = X.astype("float64") @ tensors["w"]
    close(train["ortflow.loss_sum"], (np.logaddexp(0, logits) - logits * labels).sum())


def test_samples_on_another_axis_are_refused(tmp_path: Path) -> None:
    """Recurrent layers give [time, batch, classes]; a label column of that length would be taken for other labels."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="/matmul"),
        helper.make_node("Transpose", ["h"], ["y"], perm=[1, 0, 2], name="/turn"),
    ]
    tensors = {"w": RNG.normal(size=(4, 5)).astype("float32")}
    path = save_model(tmp_path / "m.onnx", nodes, [value("x", ["n", 6, 4])], [value("y", [6, "n", 5])], tensors)
    for kind in ("cross_entropy", "mse"):
        with pytest.raises(UserError) as caught:
            built(path, {"kind": kind}, data__micro_batch=6)
        words = ("model.loss", "'y'", "[6, n, 5]", "axis 1", "transpose")
        assert [word for word in words if word not in str(caught.value)] == []


def test_refusals(tmp_path: Path) -> None:
    with_labels = model_with_labels(tmp_path / "labels.onnx", read=True)
    plain = linear(tmp_path / "m.onnx")
    single = linear(tmp_path / "single.onnx", out=("batch", 1))
    for model, loss, changes, words in [
        (single, {"kind": "cross_entropy"}, {}, "has one class on axis -1: the loss is always 0"),
        (with_labels, {"kind": "cross_entropy"}, {}, "model.loss: the model has 2 outputs (loss, logits); set"),
        (with_labels, {"kind": "cross_entropy", "output": "logit"}, {}, "no output 'logit'; it has loss, logits"),
        (with_labels, {"kind": "cross_entropy", "output": "logits"}, {}, "reads its input 'labels' itself"),
        (plain, {"kind": "cross_entropy", "label": "xw"}, {}, "already has a value 'xw'"),
        (plain, {"kind": "cross_entropy", "label": "x"}, {}, "input 'x'"),
        (plain, {"kind": "cross_entropy", "class_axis": 2}, {}, "no axis 2"),
        (plain, {"kind": "output", "output": "y"}, {}, "is not a scalar"),
        (with_labels, {"kind": "output", "output": "loss"}, {"data__last_batch": "pad"}, "data.last_batch"),
        (
            plain,
            {"kind": "mse"},
            {"model__metrics": ["accuracy"]},
            "model.metrics[0]: is accuracy, which compares numbers of classes",
        ),
        (
            plain,
            {"kind": "mse"},
            {"model__metrics": ["perplexity"]},
            "perplexity, which follows from the losses cross_entropy and output",
        ),
        (plain, {"kind": "cross_entropy"}, {"model__labels": ["target"]}, "model.labels[0]: the model has no input"),
    ]:
        with pytest.raises(UserError) as caught:
            built(model, loss, **changes)
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "graphs").exists()


@pytest.mark.parametrize(
    ("op", "attributes", "bound"),
    [
        ("SoftmaxCrossEntropyLoss", {}, 3),
        ("NegativeLogLikelihoodLoss", {}, 3),
        ("SoftmaxCrossEntropyLoss", {"ignore_index": -1}, None),
        ("GatherElements", {"axis": 1}, 3),
    ],
)
def test_the_labels_of_a_loss_that_the_model_computes_have_a_bound(
    op: str, attributes: dict[str, int], bound: int | None
) -> None:
    shape = ["batch", 1] if op == "GatherElements" else ["batch"]
    graph = helper.make_graph(
        [helper.make_node(op, ["scores", "labels"], ["loss"], **attributes)],
        "model",
        [
            helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", 3]),
            helper.make_tensor_value_info("labels", TensorProto.INT64, shape),
        ],
        [helper.make_tensor_value_info("loss", TensorProto.FLOAT, None)],
    )
    assert table_bounds(graph, ["labels"]).get("labels") == bound
