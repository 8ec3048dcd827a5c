"""The logarithm of a sigmoid and its gradient are right for logits of any size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graph_build_models import built, run_graph, save_model, tensors_of, value
from onnx import helper

from ortflow.workflow.graph.normalize.fusions import avoid_wrong_forms
from ortflow.workflow.graph.normalize.prepare import prepare

Array = np.ndarray[Any, Any]
LOGITS = np.array([-100, -50, -20, -18, -17, -15, -12, -5, -1, 0, 1, 5, 12, 16, 20, 50, 100], np.float32)
SMALL = 1e-8


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def log_sigmoid(x: Array) -> Array:
    return -np.logaddexp(0, -x)


SIGMOID = helper.make_node("Sigmoid", ["z"], ["s"], name="/sigmoid")
CONSTANTS = {"one": np.float32(1), "ones": np.ones(1, np.float32), "small": np.float32(SMALL)}
FORMS: dict[str, tuple[list[onnx.NodeProto], Callable[[Array], Array], Callable[[Array], Array]]] = {
    "Log(s)": ([helper.make_node("Log", ["s"], ["l"])], log_sigmoid, lambda x: sigmoid(-x)),
    "Log(1 - s)": (
        [helper.make_node("Sub", ["ones", "s"], ["d"]), helper.make_node("Log", ["d"], ["l"])],
        lambda x: log_sigmoid(-x),
        lambda x: -sigmoid(x),
    ),
    "Log(-s + 1)": (
        [
            helper.make_node("Neg", ["s"], ["n"]),
            helper.make_node("Add", ["n", "one"], ["d"]),
            helper.make_node("Log", ["d"], ["l"]),
        ],
        lambda x: log_sigmoid(-x),
        lambda x: -sigmoid(x),
    ),
    "Log(s + 1e-8)": (
        [helper.make_node("Add", ["s", "small"], ["d"]), helper.make_node("Log", ["d"], ["l"])],
        lambda x: np.log(sigmoid(x) + SMALL),
        lambda x: sigmoid(x) * sigmoid(-x) / (sigmoid(x) + SMALL),
    ),
}


def saved(path: Path, nodes: list[onnx.NodeProto]) -> Path:
    """The mean of a function of the sigmoid of x w."""
    nodes = [
        helper.make_node("Mul", ["x", "w"], ["z"], name="/scale"),
        SIGMOID,
        *nodes,
        helper.make_node("ReduceMean", ["l"], ["y"], keepdims=0),
    ]
    tensors = {"w": LOGITS, **{name: array for name, array in CONSTANTS.items() if any(name in n.input for n in nodes)}}
    return save_model(path, nodes, [value("x", ["batch", LOGITS.size])], [value("y", [])], tensors)


@pytest.mark.parametrize("form", FORMS)
def test_logarithms_and_their_gradients_are_those_of_double_precision(form: str, tmp_path: Path) -> None:
    nodes, function, slope = FORMS[form]
    graphs = built(saved(tmp_path / "m.onnx", nodes), {"kind": "output", "output": "y"})
    feeds = {"x": np.ones((1, LOGITS.size), np.float32), **tensors_of(graphs)}
    made = run_graph(graphs.train, feeds)
    exact = LOGITS.astype(np.float64)
    np.testing.assert_allclose(made["ortflow.loss_sum"], function(exact).mean(), 2e-6)
    np.testing.assert_allclose(made["w_grad"] * LOGITS.size, slope(exact), 1e-5, 1e-30)
    np.testing.assert_allclose(run_graph(graphs.eval, feeds)["ortflow.loss_sum"], function(exact).mean(), 2e-6)


def test_other_readers_keep_the_sigmoid(tmp_path: Path) -> None:
    """Gates and probabilities stay one node."""
    nodes = [helper.make_node("Log", ["s"], ["k"]), helper.make_node("Mul", ["s", "k"], ["l"], name="/gate")]
    model = prepare(onnx.load(saved(tmp_path / "m.onnx", nodes)))[0]
    avoid_wrong_forms(model)
    (gate,) = (node for node in model.graph.node if node.name == "/gate")
    assert gate.input[0] == "s"
    assert [node.op_type for node in model.graph.node].count("Exp") == 1
