"""Unknown sizes that are equal have one name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from ortflow.workflow.graph.autodiff.reverse import differentiate
from ortflow.workflow.graph.autodiff.sizes import unified
from ortflow.workflow.graph.ir import shapes
from ortflow.workflow.graph.ir.named_sizes import name_sizes


def model_of(lines: str, inputs: Mapping[str, Sequence[int | str]], constants: Mapping[str, Any] | None = None) -> Any:
    """`result = Operator a b; …` of floating inputs and integer constants; `-` is an omitted input."""
    nodes = []
    for line in lines.split(";"):
        made, operator, *read = line.replace("=", " ").split()
        nodes.append(helper.make_node(operator, ["" if name == "-" else name for name in read], [made], made))
    graph = helper.make_graph(
        nodes,
        "sizes",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in inputs.items()],
        [helper.make_empty_tensor_value_info("y")],
        [numpy_helper.from_array(np.array(value), name) for name, value in (constants or {}).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def found(lines: str, inputs: Mapping[str, Sequence[int | str]], **constants: Any) -> list[int | str | None] | None:
    """The sizes of y."""
    model = model_of(lines, inputs, constants)
    return shapes.named_shape(unified(model.graph, shapes.value_types(model)), "y")


X = {"x": ("batch", 6, 4)}


def test_a_reshape_to_rows_and_back() -> None:
    assert found("y = Reshape x rows", X, rows=[-1, 4]) == ["6*batch", 4]
    assert found("r = Reshape x rows; y = Reshape r whole", X, rows=[-1, 4], whole=[-1, 6, 4]) == ["batch", 6, 4]
    assert found("r = Reshape x rows; y = Reshape r heads", X, rows=[-1, 8], heads=[-1, 6, 2, 2]) == ["batch", 6, 2, 2]


def test_a_broadcast_of_equal_sizes() -> None:
    lines = "r = Reshape x rows; s = Relu r; t = Reshape s whole; y = Add t x"
    assert found(lines, X, rows=[-1, 4], whole=[-1, 6, 4]) == ["batch", 6, 4]


@pytest.mark.parametrize("axis", [0, 1])
def test_sizes_that_may_differ_stay_apart(axis: int) -> None:
    sizes: list[int | str] = ["batch", "length", 4]
    sizes[axis] = "time"
    result = found("y = Add x z", {"x": ("batch", "length", 4), "z": sizes})
    assert result is not None
    assert result[axis] not in ("batch", "length", "time")
    assert result[1 - axis] == ("batch", "length")[1 - axis]


def test_a_size_that_is_not_a_multiple_is_not_named() -> None:
    result = found("y = Reshape x rows", X, rows=[-1, 5])
    assert result is not None
    assert "batch" not in str(result[0])


def test_the_first_rows_of_a_table() -> None:
    lines = "s = Shape x; l = Gather s one; e = Unsqueeze l zero; y = Slice table zero e zero"
    given = {"x": ("batch", "time"), "table": (9, 4)}
    assert found(lines, given, one=1, zero=[0]) == ["time", 4]
    # One row may be broadcast to any number.
    assert found(lines, {**given, "table": (1, 4)}, one=1, zero=[0]) != ["time", 4]


TIME = "s = Shape x; l = Gather s one; e = Unsqueeze l zero; "
"""The size `time` of x, as a vector."""


@pytest.mark.parametrize(
    ("slices", "table", "expected"),
    [
        ("Slice table zero e one_", (4, 9), [4, "time"]),
        ("Slice table zero e last", (4, 9), [4, "time"]),
        ("Slice table zero e", (9, 4), ["time", 4]),
        ("Slice table zero e - one_", (9, 4), ["time", 4]),
        ("Slice table zero e zero one_", (9, 4), ["time", 4]),
        ("Slice table zero e one_ two", (4, 9), [4, None]),
        ("Slice table one_ e zero", (9, 4), [None, 4]),
    ],
)
def test_the_axes_and_steps_of_a_slice(slices: str, table: Sequence[int], expected: list[int | str | None]) -> None:
    given = {"x": ("batch", "time"), "table": table}
    result = found(f"{TIME}y = {slices}", given, one=1, zero=[0], one_=[1], last=[-1], two=[2])
    assert result is not None
    assert [size if size in ("time", 4, 9) else None for size in result] == expected


def test_a_count_of_places() -> None:
    lines = "s = Shape x; l = Gather s one; y = Range zero l one"
    assert found(lines, {"x": ("batch", "time")}, one=1, zero=0) == ["time"]


def test_no_gradient_is_summed_over_axes_that_are_known_to_be_equal() -> None:
    lines = "r = Reshape x rows; t = Reshape r whole; a = Add t x; y = ReduceSum a"
    model = model_of(lines, X, {"rows": [-1, 4], "whole": [-1, 6, 4]})
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 1, 1]))
    made, _ = differentiate(model, ["x"], "y")
    assert [node.op_type for node in made.graph.node].count("ReduceSum") == 1


@pytest.mark.parametrize("operator", ["Gelu", "FastGelu", "QuickGelu", "SimplifiedLayerNormalization", "FusedMatMul"])
def test_sizes_are_known_behind_operators_of_onnx_runtime(operator: str) -> None:
    model = model_of("y = Relu x", X)
    inputs = ["x", "scale"] if operator in ("SimplifiedLayerNormalization", "FusedMatMul") else ["x"]
    shape = (4, 4) if operator == "FusedMatMul" else (4,)
    domain = "" if operator == "SimplifiedLayerNormalization" else "com.microsoft"
    model.graph.node[0].CopyFrom(helper.make_node(operator, inputs, ["y"], "y", domain=domain))
    model.graph.initializer.append(numpy_helper.from_array(np.ones(shape, np.float32), "scale"))
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    assert shapes.named_shape(shapes.value_types(model), "y") == ["batch", 6, 4]


def test_recorded_sizes_are_described_in_the_order_of_the_nodes() -> None:
    """A file of the same graph then has the same hash in every process, whatever the hashes of names are there."""
    names = [f"v{number}" for number in range(12)]
    lines = "; ".join(f"{name} = Relu {before}" for before, name in zip(["x", *names], names, strict=False))
    model = model_of(f"{lines}; y = ReduceSum v11", X)
    for node in model.graph.node[:-1]:
        name_sizes(node, ["batch", 6, 4])
    derived, _ = differentiate(model, ["x"], "y")
    assert [value.name for value in derived.graph.value_info if value.name in names] == names
