"""The shapes of a graph are inferred once for passes that follow each other, and anew for another graph."""

from __future__ import annotations

import onnx
import pytest
from onnx import TensorProto, helper

from ortflow.workflow.graph.ir import shapes


def model(size: int = 3, perm: tuple[int, int] = (1, 0)) -> onnx.ModelProto:
    """y = the transpose of x, then of that by a Relu."""
    nodes = [
        helper.make_node("Transpose", ["x"], ["t"], "turn", perm=perm),
        helper.make_node("Relu", ["t"], ["y"], "end"),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, size])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    return helper.make_model(helper.make_graph(nodes, "g", [x], [y]), opset_imports=[helper.make_opsetid("", 18)])


def shape(types: dict[str, onnx.TypeProto], name: str = "t") -> list[int | None] | None:
    return shapes.shape(types, name)


def test_a_graph_is_inferred_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes.value_types(model(1))
    calls = []
    infer = shapes.shape_inference.infer_shapes
    monkeypatch.setattr(shapes.shape_inference, "infer_shapes", lambda *a, **k: [calls.append(a), infer(*a, **k)][1])
    first = shapes.value_types(model())
    needed = len(calls)
    del first["t"]
    assert shape(shapes.value_types(model())) == [3, 2]
    described = model()
    shapes.infer(described)
    assert {value.name for value in described.graph.value_info} == {"t"}
    assert needed
    assert len(calls) == needed


@pytest.mark.parametrize(("other", "expected"), [(model(5), [5, 2]), (model(3, (0, 1)), [2, 3])])
def test_another_graph_is_inferred_anew(other: onnx.ModelProto, expected: list[int]) -> None:
    assert shape(shapes.value_types(model())) == [3, 2]
    assert shape(shapes.value_types(other)) == expected
    assert shape(shapes.value_types(model())) == [3, 2]


def test_what_is_described_counts() -> None:
    """A value of an operator that onnx does not know has the shape that its description gives."""

    def described(size: int) -> list[int | None] | None:
        made = model()
        made.graph.node[0].domain = "elsewhere"
        made.opset_import.append(helper.make_opsetid("elsewhere", 1))
        shapes.infer(made, [helper.make_tensor_value_info("t", TensorProto.FLOAT, [size])])
        return shapes.shape({value.name: value.type for value in made.graph.output}, "y")

    assert [described(4), described(6), described(4)] == [[4], [6], [4]]
