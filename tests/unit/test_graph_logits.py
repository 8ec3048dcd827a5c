"""Losses of logits where the output gives probabilities, as Keras, JAX and PaddlePaddle export classifiers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graph_build_models import Array, built, linear, run_graph, save_model, tensors_of, value
from onnx import helper

BATCH, CLASSES, WIDTH = 6, 5, 4
RNG = np.random.default_rng(11)
X = RNG.normal(size=(BATCH, WIDTH)).astype("float32")
CROSS_ENTROPY = {"kind": "cross_entropy"}
Chain = Sequence[tuple[str, list[str], dict[str, Any]]]
"""Operator, inputs after `_`, the value before, and attributes of each node behind the logits [batch, 3, 5]."""

SOFTMAX: Chain = [("Softmax", ["_"], {"axis": -1})]
WRITTEN_OUT: Chain = [
    ("Exp", ["_"], {}),
    ("ReduceSum", ["n0", "last"], {"keepdims": 1}),
    ("Div", ["n0", "n1"], {}),
]
WITH_MAXIMUM: Chain = [
    ("ReduceMax", ["_", "last"], {"keepdims": 0}),
    ("Reshape", ["n0", "column"], {}),
    ("Expand", ["n1", "full"], {}),
    ("Sub", ["_", "n2"], {}),
    ("Exp", ["n3"], {}),
    ("ReduceSum", ["n4", "last"], {"keepdims": 0}),
    ("Reshape", ["n5", "column"], {}),
    ("Expand", ["n6", "full"], {}),
    ("Div", ["n4", "n7"], {}),
]
TENSORS = {
    "last": np.array([2]),
    "middle": np.array([1]),
    "both": np.array([1, 2]),
    "column": np.array([0, 3, 1]),
    "full": np.array([BATCH, 3, CLASSES]),
    "rows": np.array([-1, 3, CLASSES]),
    "pairs": np.array([-1, CLASSES]),
    "front": np.array([0]),
    "images": np.array([-1, CLASSES, 1, 3]),
    "planes": np.array([-1, CLASSES, 1]),
    "two": np.float32(2),
}


def chain_of(path: Path, chain: Chain, dims: Sequence[int | str] = ("batch", 3, CLASSES)) -> Path:
    """A linear model with a chain of nodes behind its logits [batch, 3, 5]; the last one gives `p`."""
    model = onnx.load(linear(path, out=("batch", 3, CLASSES)))
    names = [f"n{place}" for place in range(len(chain) - 1)] + ["p"]
    nodes = [
        helper.make_node(op, [("y" if place == "_" else place) for place in inputs], [name], f"/{name}", **attributes)
        for name, (op, inputs, attributes) in zip(names, chain, strict=True)
    ]
    tensors = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    read = {name for node in nodes for name in node.input}
    more = {name: np.asarray(array) for name, array in TENSORS.items() if name in read}
    outputs = [value("p", dims)]
    return save_model(path, [*model.graph.node, *nodes], [value("x", ["batch", WIDTH])], outputs, {**tensors, **more})


def compared(tmp_path: Path, chain: Chain, loss: dict[str, Any], dims: Sequence[int | str], labels: Array) -> list[str]:
    """Check loss and gradient against those of the logits, and the kept output; the notes of the build."""
    (tmp_path / "plain").mkdir()
    last, inputs, attributes = chain[-1]
    layout = last in ("Identity", "Reshape", "Transpose")
    step = (last, ["_", *inputs[1:]], attributes) if layout else ("Identity", ["_"], {})
    plain = built(chain_of(tmp_path / "plain/m.onnx", [step], dims), loss)
    batch = {"data__micro_batch": BATCH}
    graphs = built(chain_of(tmp_path / "m.onnx", chain, dims), loss, model__metrics=["accuracy"], **batch)
    feeds = {"x": X, "labels": labels, **tensors_of(graphs)}
    expected = run_graph(plain.train, {**feeds, **tensors_of(plain)})
    train, evaluation = run_graph(graphs.train, feeds), run_graph(graphs.eval, feeds)
    for name in ("ortflow.loss_sum", "ortflow.loss_weight", "w_grad", "b_grad"):
        np.testing.assert_allclose(train[name], expected[name], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(evaluation["ortflow.loss_sum"], expected["ortflow.loss_sum"], rtol=1e-5)
    assert ((evaluation["p"] > 0) & (evaluation["p"] < 1)).all(), "the output stays what it was"
    return [note for note in graphs.notes if "gives probabilities" in note]


@pytest.mark.parametrize(
    "chain",
    [
        SOFTMAX,
        [*SOFTMAX, ("Identity", ["n0"], {})],
        [*SOFTMAX, ("Reshape", ["n0", "rows"], {})],
        WRITTEN_OUT,
        WITH_MAXIMUM,
    ],
    ids=["softmax", "identity", "reshape", "written out", "with the maximum"],
)
def test_cross_entropy_reads_the_logits(tmp_path: Path, chain: Chain) -> None:
    labels = RNG.integers(0, CLASSES, (BATCH, 3))
    (note,) = compared(tmp_path, chain, CROSS_ENTROPY, ("batch", 3, CLASSES), labels)
    assert note.startswith("output 'p' gives probabilities, and cross_entropy takes logits: the loss reads '")
    assert "; the exported model keeps it" in note


def test_classes_on_an_axis_that_moves(tmp_path: Path) -> None:
    """Probabilities over the last axis, which the output has in front of the positions."""
    chain: Chain = [*SOFTMAX, ("Transpose", ["n0"], {"perm": [0, 2, 1]})]
    labels = RNG.integers(0, CLASSES, (BATCH, 3))
    assert compared(tmp_path, chain, {"kind": "cross_entropy", "class_axis": 1}, ("batch", CLASSES, 3), labels)


def test_classes_on_an_axis_that_is_reshaped(tmp_path: Path) -> None:
    """As in SqueezeNet of the model zoo: opset 13 writes its Softmax over [batch, classes, 1, 1] on two axes."""
    chain: Chain = [
        ("Reshape", ["_", "pairs"], {}),
        ("Softmax", ["n0"], {"axis": -1}),
        ("Reshape", ["n1", "planes"], {}),
    ]
    labels = RNG.integers(0, CLASSES, (BATCH * 3, 1))
    notes = compared(tmp_path, chain, {"kind": "cross_entropy", "class_axis": 1}, ("rows", CLASSES, 1), labels)
    assert len(notes) == 1


def test_a_reshape_that_mixes_the_classes_keeps_the_probabilities(tmp_path: Path) -> None:
    """[batch, 3, 5] as [batch, 5, 1, 3]: the elements along the axis of length 5 are those of three distributions."""
    chain: Chain = [*SOFTMAX, ("Reshape", ["n0", "images"], {})]
    graphs = built(chain_of(tmp_path / "m.onnx", chain, ("batch", CLASSES, 1, 3)), {**CROSS_ENTROPY, "class_axis": 1})
    assert not [note for note in graphs.notes if "gives probabilities" in note]


@pytest.mark.parametrize("chain", [[], [("Reshape", ["n0", "pairs"], {})]], ids=["sigmoid", "reshape"])
def test_binary_cross_entropy_reads_the_logits(tmp_path: Path, chain: Chain) -> None:
    dims: tuple[int | str, ...] = ("rows", CLASSES) if chain else ("batch", 3, CLASSES)
    labels = RNG.random((BATCH * 3, CLASSES) if chain else (BATCH, 3, CLASSES)).astype("float32")
    (note,) = compared(tmp_path, [("Sigmoid", ["_"], {}), *chain], {"kind": "bce_with_logits"}, dims, labels)
    assert "bce_with_logits takes logits: the loss reads 'y', before node '/" in note


def log_of(p: Array) -> Array:
    return p - p.max(-1, keepdims=True) - np.log(np.exp(p - p.max(-1, keepdims=True)).sum(-1, keepdims=True))


def softmax(x: Array, axis: int) -> Array:
    raised = np.exp(x - x.max(axis, keepdims=True))
    result: Array = raised / raised.sum(axis, keepdims=True)
    return result


@pytest.mark.parametrize(
    ("chain", "function"),
    [
        ([("Softmax", ["_"], {"axis": 1})], lambda y: softmax(y, 1)),
        ([("Exp", ["_"], {}), ("ReduceSum", ["n0", "middle"], {"keepdims": 1}), ("Div", ["n0", "n1"], {})],
         lambda y: softmax(y, 1)),
        ([("Exp", ["_"], {}), ("ReduceSum", ["n0", "both"], {"keepdims": 1}), ("Div", ["n0", "n1"], {})],
         lambda y: np.exp(y) / np.exp(y).sum((1, 2), keepdims=True)),
        ([*SOFTMAX, ("Mul", ["n0", "two"], {})], lambda y: 2 * softmax(y, -1)),
        ([("Exp", ["_"], {}), ("Div", ["n0", "two"], {})], lambda y: np.exp(y) / 2),
        ([("Sigmoid", ["_"], {})], lambda y: 1 / (1 + np.exp(-y))),
        ([("LogSoftmax", ["_"], {"axis": -1})], lambda y: y),
    ],
    ids=["another axis", "another sum", "a sum over two axes", "scaled", "no sum", "sigmoid", "logarithms"],
)  # fmt: skip
def test_what_is_not_a_distribution_over_the_classes_is_read_as_it_is(
    tmp_path: Path, chain: Chain, function: Callable[[Array], Array]
) -> None:
    graphs = built(chain_of(tmp_path / "m.onnx", chain), CROSS_ENTROPY)
    labels, tensors = RNG.integers(0, CLASSES, (BATCH, 3)), tensors_of(graphs)
    train = run_graph(graphs.train, {"x": X, "labels": labels, **tensors})
    y = (X.astype("float64") @ tensors["w"] + tensors["b"]).reshape(BATCH, 3, CLASSES)
    expected = -np.take_along_axis(log_of(function(y)), labels[..., None], -1).sum()
    np.testing.assert_allclose(train["ortflow.loss_sum"], expected, rtol=1e-5)
    assert not [note for note in graphs.notes if "gives probabilities" in note]


def test_other_losses_read_the_probabilities(tmp_path: Path) -> None:
    graphs = built(chain_of(tmp_path / "m.onnx", SOFTMAX), {"kind": "mse"})
    tensors = tensors_of(graphs)
    y = (X.astype("float64") @ tensors["w"] + tensors["b"]).reshape(BATCH, 3, CLASSES)
    train = run_graph(graphs.train, {"x": X, "labels": np.zeros((BATCH, 3, CLASSES), "float32"), **tensors})
    np.testing.assert_allclose(train["ortflow.loss_sum"], (softmax(y, -1) ** 2).sum(), rtol=1e-5)
