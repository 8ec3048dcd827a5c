"""Versions of the optimizers' graphs: what ONNX Runtime 1.19.2, the oldest supported release, can load."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from ortflow.workflow.optim.builder import ROW, Builder


@pytest.mark.parametrize(
    ("kernels", "domains", "own"), [(False, (), []), (True, (), ["ortflow"]), (True, ("a.b",), ["a.b", "ortflow"])]
)
def test_versions_and_domains(kernels: bool, domains: tuple[str, ...], own: list[str]) -> None:
    model = Builder("name", kernels=kernels, domains=domains).model()
    assert (model.ir_version, model.graph.name, model.producer_name) == (8, "name", "ortflow")
    found = [(each.domain, each.version) for each in model.opset_import]
    assert found == [("", 18), ("com.microsoft", 1), *((domain, 1) for domain in own)]


def test_a_sum_of_squares_remembers_its_vector() -> None:
    build = Builder("name")
    values = build.input("values", 2 * ROW)
    total = build.square_sum(values, "total")
    assert (total, build.square_sums) == ("total", {"total": "values"})
    build.output(build.root(total), 1)
    onnx.checker.check_model(build.model(), full_check=True)
    rows = onnx.numpy_helper.to_array(build.graph.initializer[0])
    assert np.array_equal(rows, [-1, 64])


def test_an_operator_of_ours_is_of_the_first_domain() -> None:
    build = Builder("name", kernels=True, domains=["a.b"])
    name = build.own("Operator", build.input("values", 64), TensorProto.DOUBLE)
    assert [(node.op_type, node.domain, list(node.output)) for node in build.graph.node] == [
        ("Operator", "a.b", [name])
    ]
    (described,) = build.graph.value_info
    kind = described.type.tensor_type
    assert (described.name, kind.elem_type, [dim.dim_value for dim in kind.shape.dim]) == (
        name,
        TensorProto.DOUBLE,
        [1],
    )


def late(build: Builder) -> None:
    build("Sub", build("Add", "moment.0", "gradients.0", output="moment.0.out"), "moment.0", output="parameters.0.out")


def late_through_a_view(build: Builder) -> None:
    new = build("Add", "moment.0", "gradients.0", output="moment.0.out")
    view = build("Reshape", "moment.0", build.constant([-1, ROW], "int64"))
    build("Sub", new, build("ReduceMax", view, keepdims=0), output="parameters.0.out")


def not_elementwise(build: Builder) -> None:
    build("CumSum", "moment.0", build.constant(0, "int64"), output="moment.0.out")
    build("Sub", "parameters.0", "moment.0.out", output="parameters.0.out")


def another_operator(build: Builder) -> None:
    build("QuickGelu", "moment.0", output="moment.0.out", domain="com.microsoft")
    build("Sub", "parameters.0", "moment.0.out", output="parameters.0.out")


@pytest.mark.parametrize("rule", [late, late_through_a_view, not_elementwise, another_operator])
def test_no_buffer_is_read_behind_its_writer(rule: Callable[[Builder], None]) -> None:
    build = Builder("name")
    for name in ("parameters.0", "gradients.0", "moment.0"):
        build.input(name, 2 * ROW)
    for name in ("parameters.0.out", "moment.0.out"):
        build.output(name, 2 * ROW)
    rule(build)
    with pytest.raises(AssertionError, match=r"may read 'moment\.0' of the graph 'name'"):
        build.model()
