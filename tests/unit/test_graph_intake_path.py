"""Which nodes training differentiates, and that only those are changed."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.autodiff.expand import make_differentiable
from ortflow.workflow.graph.autodiff.path import Path, gradient_path
from ortflow.workflow.graph.ir import shapes
from ortflow.workflow.graph.normalize.prepare import prepare


def node(op: str, *inputs: str, output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs, [output], output, **attributes)


def graph(*nodes: onnx.NodeProto, outputs: tuple[str, ...] = ("loss",)) -> onnx.ModelProto:
    """w is the only parameter, x an input."""
    return prepare(
        helper.make_model(
            helper.make_graph(
                list(nodes),
                "test",
                [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in ("x", "w")],
                [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
                initializer=[
                    numpy_helper.from_array(np.zeros(4, np.float32), "zero"),
                    numpy_helper.from_array(np.array([2]), "two"),
                ],
            ),
            opset_imports=[helper.make_opsetid("", 18)],
            ir_version=8,
        )
    )[0]


def path(model: onnx.ModelProto) -> tuple[set[str], Path]:
    found = gradient_path(model.graph, shapes.value_types(model), ["w"], ["loss"])
    return {model.graph.node[place].name for place in found.nodes}, found


LOSS = node("ReduceSum", "h", output="loss", keepdims=0)


def test_what_needs_no_parameter_or_does_not_reach_the_loss_is_left_out() -> None:
    model = graph(
        node("Det", "x", output="a"),
        node("Mul", "w", "a", output="h"),
        node("Unique", "w", output="other"),
        LOSS,
        outputs=("loss", "other"),
    )
    nodes, found = path(model)
    assert nodes == {"h", "loss"}
    assert found.values == {"w", "h", "loss"}
    assert found.reached == {"w"}
    make_differentiable(model, ["w"], "loss")
    with pytest.raises(UserError, match=r"node 'other' \(Unique\).*freeze"):
        make_differentiable(model, ["w"], "other")


@pytest.mark.parametrize("stop", ["ArgMax", "Greater", "Cast", "Shape"])
def test_whole_numbers_and_truths_carry_no_gradient(stop: str) -> None:
    before = {
        "ArgMax": node("ArgMax", "w", output="stopped"),
        "Greater": node("Greater", "w", "zero", output="stopped"),
        "Cast": node("Cast", "w", output="stopped", to=TensorProto.INT64),
        "Shape": node("Shape", "w", output="stopped"),
    }[stop]
    nodes, found = path(
        graph(before, node("Cast", "stopped", output="number", to=1), node("Mul", "w", "number", output="h"), LOSS)
    )
    assert nodes == {"h", "loss"}
    assert found.reached == {"w"}


def test_a_parameter_behind_a_stop_is_not_reached() -> None:
    _, found = path(graph(node("Cast", "w", output="i", to=7), node("Cast", "i", output="h", to=1), LOSS))
    assert found.reached == frozenset()


def test_only_the_path_is_written_out() -> None:
    model = graph(
        node("Shrink", "x", output="a"), node("Mul", "w", "a", output="m"), node("Shrink", "m", output="h"), LOSS
    )
    ready, notes = make_differentiable(model, ["w"], "loss")
    kinds = [n.op_type for n in ready.graph.node]
    assert kinds.count("Shrink") == 1
    assert "1 Shrink decomposed for training" in notes
    assert [n.name for n in model.graph.node] == ["a", "m", "h", "loss"]


def test_a_loop_on_the_path_is_named() -> None:
    body = helper.make_graph(
        [node("Mul", "w", "state", output="next"), node("Identity", "go", output="again")],
        "body",
        [
            helper.make_tensor_value_info("turn", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("state", TensorProto.FLOAT, [4]),
        ],
        [
            helper.make_tensor_value_info("again", TensorProto.BOOL, []),
            helper.make_tensor_value_info("next", TensorProto.FLOAT, [4]),
        ],
    )
    model = graph(
        node("ReduceMax", "x", output="largest", keepdims=0),
        node("Cast", "largest", output="count", to=TensorProto.INT64),
        node("Loop", "count", "", "x", output="h", body=body),
        LOSS,
    )
    with pytest.raises(UserError, match=r"node 'h' \(Loop\).*cannot be differentiated"):
        make_differentiable(model, ["w"], "loss")
