"""Checks the differentiator's gradient of one operator against finite differences of the loss in double precision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from precise_operators import OPERATORS

from ortflow.workflow.graph.autodiff.compose import compose
from ortflow.workflow.graph.autodiff.reverse import differentiate
from ortflow.workflow.onnx_runtime import onnxruntime

OPSET = 18
STEP = 1e-5
"""Of a central difference in double precision."""

_TYPES = {
    "float32": TensorProto.FLOAT,
    "float64": TensorProto.DOUBLE,
    "int64": TensorProto.INT64,
    "int32": TensorProto.INT32,
    "bool": TensorProto.BOOL,
}


def model_of(
    operator: str,
    inputs: Mapping[str, Any],
    parameters: Sequence[str],
    *,
    outputs: int = 1,
    uses: Sequence[int] = (0,),
    domain: str = "",
    unknown: bool = False,
    real: str = "float32",
    **attributes: Any,
) -> onnx.ModelProto:
    """A node whose outputs `uses` are squared, weighted by fixed numbers and summed to the value `loss`.

    `inputs` are arrays by name, None for one that is omitted. Floating arrays in `parameters` and those whose name
    begins with `x` are inputs of the graph, the others initializers. With `unknown`, no axis of a graph's input has a
    known size. The node has its first `outputs` outputs, whether used or not.
    """
    nodes = [
        helper.make_node(
            operator,
            ["" if array is None else name for name, array in inputs.items()],
            [f"y{place}" if place in uses or place < outputs else "" for place in range(max(*uses, outputs - 1) + 1)],
            "node",
            domain=domain,
            **attributes,
        )
    ]
    given, constants = [], []
    for name, array in inputs.items():
        if array is None:
            continue
        array = np.asarray(array)
        if array.dtype.kind == "f":
            array = array.astype(real)
        if name in parameters or name.startswith("x"):
            shape = [None] * array.ndim if unknown else array.shape
            given.append(helper.make_tensor_value_info(name, _TYPES[str(array.dtype)], shape))
        else:
            constants.append(numpy_helper.from_array(array, name))
    for place in uses:
        weight = np.asarray(0.5 + 0.3 * place, real)
        constants.append(numpy_helper.from_array(weight, f"weight{place}"))
        nodes += [
            helper.make_node("Mul", [f"y{place}", f"y{place}"], [f"square{place}"], f"square{place}"),
            helper.make_node("Add", [f"square{place}", f"y{place}"], [f"both{place}"], f"both{place}"),
            helper.make_node("ReduceSum", [f"both{place}"], [f"sum{place}"], f"sum{place}", keepdims=0),
            helper.make_node("Mul", [f"sum{place}", f"weight{place}"], [f"part{place}"], f"part{place}"),
        ]
    total = f"part{uses[0]}"
    for place in uses[1:]:
        nodes.append(helper.make_node("Add", [total, f"part{place}"], [f"total{place}"], f"total{place}"))
        total = f"total{place}"
    nodes.append(helper.make_node("Identity", [total], ["loss"], "loss"))
    loss = helper.make_tensor_value_info("loss", _TYPES[real], [])
    graph = helper.make_graph(nodes, "case", given, [loss], constants)
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, ir_version=10, opset_imports=opsets)


def gradients_of(model: onnx.ModelProto, inputs: Mapping[str, Any], parameters: Sequence[str]) -> dict[str, np.ndarray]:
    """Gradients by parameter, computed by ONNX Runtime from the differentiated graph."""
    made, reached = differentiate(model, parameters, "loss")
    assert reached == list(parameters)
    made = compose(made)
    if not any(node.domain or node.op_type == "SimplifiedLayerNormalization" for node in made.graph.node):
        onnx.checker.check_model(made, full_check=True)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(made.SerializeToString(), options, providers=["CPUExecutionProvider"])
    given = {value.name for value in session.get_inputs()}
    feeds = {
        name: np.asarray(array, np.float32 if np.asarray(array).dtype.kind == "f" else None)
        for name, array in inputs.items()
        if name in given
    }
    names = [f"{name}_grad" for name in parameters]
    return dict(zip(parameters, session.run(names, feeds), strict=True))


def differences_of(
    model: onnx.ModelProto,
    inputs: Mapping[str, Any],
    parameters: Sequence[str],
    new_ops: Sequence[type[OpRun]] = (),
) -> dict[str, np.ndarray]:
    """Central differences of `loss` along each element of each parameter; `model` computes in double precision.

    `new_ops` compute what onnx's evaluator does not support, or not in double precision.
    """
    reference = ReferenceEvaluator(model, new_ops=[*OPERATORS, *new_ops])
    given = {value.name for value in model.graph.input}
    feeds = {}
    for name, array in inputs.items():
        if name in given:
            array = np.asarray(array)
            feeds[name] = array.astype(np.float64) if array.dtype.kind == "f" else array

    def loss() -> float:
        return float(reference.run(["loss"], feeds)[0])

    found = {}
    for name in parameters:
        feeds[name] = array = feeds[name].copy()
        result = np.zeros(array.shape)
        for place in np.ndindex(array.shape):
            value = array[place]
            array[place] = value + STEP
            above = loss()
            array[place] = value - STEP
            below = loss()
            array[place] = value
            result[place] = (above - below) / (2 * STEP)
        found[name] = result
    return found


def check(
    operator: str,
    inputs: Mapping[str, Any],
    parameters: Sequence[str],
    reference: Mapping[str, Any] | None = None,
    *,
    new_ops: Sequence[type[OpRun]] = (),
    **options: Any,
) -> None:
    """Asserts that each gradient equals the differences, with known and with unknown sizes.

    `reference` holds attributes with which onnx's evaluator, which does not support every form, computes the same.
    """
    precise = model_of(operator, inputs, parameters, real="float64", **{**options, **(reference or {})})
    expected = differences_of(precise, inputs, parameters, new_ops)
    check_against(expected, operator, inputs, parameters, **options)


def check_against(
    expected: Mapping[str, np.ndarray],
    operator: str,
    inputs: Mapping[str, Any],
    parameters: Sequence[str],
    **options: Any,
) -> None:
    """Asserts that each gradient is the expected one, with known and with unknown sizes."""
    for unknown in (False, True):
        model = model_of(operator, inputs, parameters, unknown=unknown, **options)
        found = gradients_of(model, inputs, parameters)
        for name in parameters:
            assert found[name].shape == expected[name].shape, name
            scale = max(1.0, float(np.abs(expected[name]).max(initial=0)))
            np.testing.assert_allclose(found[name], expected[name], rtol=2e-4, atol=2e-5 * scale, err_msg=name)
