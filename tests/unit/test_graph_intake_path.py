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
    assert found.nodes <= {*range(len(model.graph.node))}
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


def test_a_node_in_a_loop_on_the_path_is_named() -> None:
    inverse = helper.make_node("Inverse", ["product"], ["next"], "inverse", domain="com.microsoft")
    body = helper.make_graph(
        [node("Mul", "w", "state", output="product"), inverse, node("Identity", "go", output="again")],
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
    with pytest.raises(UserError, match=r"Inverse cannot be differentiated"):
        make_differentiable(model, ["w"], "loss")


@pytest.mark.parametrize(
    ("op", "inputs", "carry"),
    [
        ("BatchNormalization", 5, {0, 1, 2}),
        ("Clip", 3, {0}),
        ("Dropout", 2, {0}),
        ("EyeLike", 1, set()),
        ("OneHot", 3, set()),
        ("Pad", 3, {0}),
        ("Range", 3, set()),
        ("Resize", 4, {0}),
        ("SoftmaxCrossEntropyLoss", 3, {0}),
        ("Where", 3, {1, 2}),
        ("Conv", 3, {0, 1, 2}),
    ],
)
def test_which_inputs_of_an_operator_carry_a_gradient(op: str, inputs: int, carry: set[int]) -> None:
    """Each input is the only parameter in turn. Integers and truths have no gradient, whatever their place."""
    others = {("Pad", 1): TensorProto.INT64, ("Resize", 3): TensorProto.INT64, ("Where", 0): TensorProto.BOOL,
              ("SoftmaxCrossEntropyLoss", 1): TensorProto.INT64}  # fmt: skip
    names = [f"input{place}" for place in range(inputs)]
    types = {
        name: helper.make_tensor_type_proto(others.get((op, place), TensorProto.FLOAT), [4])
        for place, name in enumerate([*names, "y"])
    }
    made = helper.make_graph([node(op, *names, output="y")], "test", [], [])
    found = [gradient_path(made, types, [name], ["y"]) for name in names]
    assert {place for place, each in enumerate(found) if each.nodes} == carry
    assert all(each.nodes <= {0} for each in found)
    assert [each.reached for each in found] == [
        frozenset([name]) if place in carry else frozenset() for place, name in enumerate(names)
    ]


def test_a_value_without_a_known_type_may_carry_a_gradient() -> None:
    made = helper.make_graph([node("Relu", "a", output="b"), node("Neg", "b", output="y")], "test", [], [])
    assert gradient_path(made, {}, ["a"], ["y"]).nodes == {0, 1}
