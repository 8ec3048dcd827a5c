"""Shapes of parameters are constants in the graphs of a pipeline's stages on GPUs."""

from __future__ import annotations

import numpy as np
import pytest
from graph_build_models import value
from onnx import helper, numpy_helper

from ortflow.workflow.graph.optimize.fixed_shapes import fix_shapes


@pytest.mark.parametrize("flags", [{}, {"start": 1}, {"start": -2, "end": -1}], ids=str)
def test_a_parameter_is_not_read_for_its_shape_alone(flags: dict[str, int]) -> None:
    nodes = [
        helper.make_node("Shape", ["w"], ["size"], **flags),
        helper.make_node("Shape", ["x"], ["dynamic"]),
        helper.make_node("Shape", ["read"], ["third"]),
        helper.make_node("Add", ["x", "read"], ["sum"]),
    ]
    inputs = [value("w", [1024, 768]), value("x", ["batch", 3]), value("read", [1, 3])]
    outputs = [value(name, [None], "int64") for name in ("size", "dynamic", "third")]
    graph = helper.make_graph(nodes, "g", inputs, [*outputs, value("sum", ["batch", 3])])
    fix_shapes(graph)
    assert [node.op_type for node in graph.node] == ["Constant", "Shape", "Constant", "Add"]
    assert [each.name for each in graph.input] == ["x", "read"], "nothing reads the other one"
    sizes = {
        node.output[0]: numpy_helper.to_array(node.attribute[0].t) for node in graph.node if node.op_type == "Constant"
    }
    np.testing.assert_array_equal(sizes["size"], [1024, 768][slice(flags.get("start"), flags.get("end"))])
    np.testing.assert_array_equal(sizes["third"], [1, 3])
