"""The inverse of a one-sided Fourier transform, as PyTorch's exporter writes it, against numpy."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ortflow.workflow.graph.decompose.spectral import replace_inverse_halves
from ortflow.workflow.graph.normalize.prepare import prepare
from ortflow.workflow.graph.roles.decide import classify
from ortflow.workflow.graph.roles.guesses import refuse_guesses
from ortflow.workflow.onnx_runtime import onnxruntime
from ortflow.workflow.spec.model import ParameterPatterns

RANDOM = np.random.default_rng(6)


def model_of(shape: tuple[int | str, ...], length: int | None, axis: int) -> onnx.ModelProto:
    inputs = ["x"] if length is None else ["x", "length"]
    node = helper.make_node("DFT", inputs, ["y"], "inverse", axis=axis, inverse=1, onesided=1)
    graph = helper.make_graph(
        [node],
        "inverse",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [] if length is None else [numpy_helper.from_array(np.asarray(length), "length")],
    )
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)])


@pytest.mark.parametrize("length", [None, 1, 2, 7, 8, 9, 12])
@pytest.mark.parametrize(("held", "axis"), [(5, 1), (5, -2), (2, 1)])
def test_it_is_the_inverse(held: int, axis: int, length: int | None) -> None:
    """Of spectra that are longer, shorter or as long as the length needs."""
    shape = (2, held, 3) if axis == 1 else (2, 3, held)
    x = RANDOM.normal(size=(*shape, 2)).astype(np.float32)
    model = model_of((*shape, 2), length, axis)
    assert replace_inverse_halves(model) == ["1 inverse one-sided DFT written as two-sided"]
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": x})
    expected = np.fft.irfft(x[..., 0] + 1j * x[..., 1], length, 1 if axis == 1 else 2)
    np.testing.assert_allclose(found, expected[..., None], atol=1e-5)


def test_its_weights_are_constants_for_certain() -> None:
    """A long convolution by FFT: they are more than the parameters, and no exporter knows them."""
    model = model_of((2, 65, 3, 2), None, 1)
    node = helper.make_node("Mul", ["filter", "x"], ["filtered"], "filter")
    model.graph.node[0].input[0] = "filtered"
    model.graph.node.insert(0, node)
    model.graph.initializer.append(numpy_helper.from_array(np.ones((65, 1, 2), np.float32), "filter"))
    prepared, _ = prepare(model)
    roles = classify(prepared, ParameterPatterns(), [])
    refuse_guesses(roles, "model.onnx")
    assert roles.trained == ["filter"]
    assert [role.confidence for role in roles if role.count == 65] == ["certain"]


@pytest.mark.parametrize(
    "shape", [("batch", "frequencies", 2), (2, 2**40, 2), (2, 0, 2), ()], ids=["unknown", "vast", "empty", "scalar"]
)
def test_what_has_no_usable_size_stays(shape: tuple[int | str, ...]) -> None:
    model = model_of(shape, None, 1)
    assert replace_inverse_halves(model) == []
    assert [node.name for node in model.graph.node] == ["inverse"]
