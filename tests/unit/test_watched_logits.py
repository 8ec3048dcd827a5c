"""Which outputs are taken for probabilities: by their values, and for binary cross-entropy by their nodes, too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from graph_build_models import built, linear, save_model, value
from onnx import helper

from ortflow.workflow.graph.types import GraphSet
from ortflow.workflow.spec.model import CrossEntropy
from ortflow.workflow.trainer import Report
from ortflow.workflow.trainer.export.watched_logits import seem_probabilities, watch_logits

RNG = np.random.default_rng(3)
Floats = npt.NDArray[np.float32]


def softmax(axis: int) -> Floats:
    raised = np.exp(RNG.normal(size=(4, 5, 6)).astype(np.float32))
    made: Floats = raised / raised.sum(axis, keepdims=True)
    return made


class TestValues:
    @pytest.mark.parametrize("axis", [1, 2, -1])
    def test_distributions_over_the_classes(self, axis: int) -> None:
        assert seem_probabilities(softmax(axis), axis)
        assert seem_probabilities(softmax(axis).astype(np.float16), axis)
        assert seem_probabilities(np.eye(5, dtype=np.float32), 1)

    @pytest.mark.parametrize(
        "values",
        [
            softmax(2),
            softmax(1) - np.float32(0.01),
            RNG.random((4, 5)).astype(np.float32),
            np.zeros((4, 5), np.float32),
            np.array([[1.5, -0.5]], np.float32),
            np.full((4, 5), np.nan, np.float32),
            np.zeros((0, 5), np.float32),
            np.eye(5, dtype=np.int64),
        ],
        ids=["another axis", "no sum", "chance", "zeros", "outside", "nan", "empty", "integers"],
    )
    def test_no_distributions(self, values: Floats) -> None:
        assert not seem_probabilities(values, 1)

    def test_independent_probabilities(self) -> None:
        assert seem_probabilities(np.array([0.2, 0.7], np.float32), None)
        assert seem_probabilities(np.array([0, 0.5, 1], np.float32), None)
        for values in ([0.2, 1.1], [-0.1, 0.5], [0.5, 0.5], [0, 0], [np.nan, 0.5]):
            assert not seem_probabilities(np.array(values, np.float32), None)


def ended_by(path: Path, *operators: str) -> Path:
    """x w, and these operators one after the other; those of two inputs read a tensor of their own, too."""
    names = ["h", *(f"n{place}" for place in range(len(operators)))]
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"])]
    tensors = {"w": RNG.normal(size=(5, 5)).astype(np.float32)}
    for place, op in enumerate(operators):
        inputs = [names[place]]
        if op in ("Add", "Mul", "Div", "MatMul"):
            inputs.append(f"t{place}")
            tensors[inputs[1]] = RNG.random((5, 5)).astype(np.float32)
        nodes.append(helper.make_node(op, inputs, [names[place + 1]]))
    return save_model(path, nodes, [value("x", [5, 5])], [value(names[-1], [5, 5])], tensors)


@pytest.mark.parametrize(
    ("operators", "watched"),
    [
        (["Tanh", "Mul", "Add"], True),
        (["Neg", "Exp", "Add", "Reciprocal"], True),
        (["Sigmoid", "Mul"], True),
        (["Sigmoid"], False),
        (["Sigmoid", "MatMul"], False),
        (["Sigmoid", "MatMul", "Add"], False),
        (["Div"], False),
        (["Clip"], False),
        (["Relu"], False),
        ([], False),
    ],
)
def test_binary_cross_entropy_looks_behind_squashing_operators_alone(
    operators: Sequence[str], watched: bool, tmp_path: Path
) -> None:
    graphs = built(ended_by(tmp_path / "m.onnx", *operators), {"kind": "bce_with_logits"}, data__micro_batch=5)
    assert bool(graphs.unproved_logits) == watched
    assert GraphSet.load(graphs.root).unproved_logits == graphs.unproved_logits


def test_other_losses_and_absent_outputs_are_not_looked_at(tmp_path: Path) -> None:
    warnings: list[str] = []
    loss, report = CrossEntropy(kind="cross_entropy"), Report(warn=warnings.append)
    assert watch_logits(built(linear(tmp_path / "m.onnx"), {"kind": "mse"}), loss, report) is None
    watch = watch_logits(built(linear(tmp_path / "m.onnx")), loss, report)
    assert watch is not None
    watch({"other": np.eye(5, dtype=np.float32)})
    assert not warnings
    watch({"y": np.eye(5, dtype=np.float32)})
    assert len(warnings) == 1
