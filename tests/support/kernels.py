"""Single operators of the domain `ortflow` as sessions of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from ortflow.workflow.kernels.library import find_library

Array = npt.NDArray[Any]
LIBRARY = find_library()
needs_kernels = pytest.mark.skipif(LIBRARY.path is None, reason=f"kernels: {LIBRARY.note}")
_TYPES = {"float32": TensorProto.FLOAT, "int64": TensorProto.INT64}


def compute(operator: str, *inputs: Array, outputs: int = 1, threads: int = 2, **attributes: Any) -> list[Array]:
    """What the operator makes of the inputs."""
    options = ort.SessionOptions()
    options.register_custom_ops_library(str(LIBRARY.path))
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    given, made = [f"in.{i}" for i in range(len(inputs))], [f"out.{i}" for i in range(outputs)]
    graph = helper.make_graph(
        [helper.make_node(operator, given, made, domain="ortflow", **attributes)],
        "operator",
        [_value(name, _TYPES[str(array.dtype)]) for name, array in zip(given, inputs, strict=True)],
        [_value(name, TensorProto.FLOAT) for name in made],
    )
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("ortflow", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=9)
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(made, dict(zip(given, inputs, strict=True))))


def _value(name: str, element: int) -> Any:
    return helper.make_tensor_value_info(name, element, None)


def normal(seed: int, *dims: int) -> Array:
    """Normally distributed fp32."""
    return np.random.default_rng(seed).standard_normal(dims).astype(np.float32)


def off(result: Array, reference: Array) -> float:
    """Largest difference, relative to the reference's largest value."""
    assert result.shape == reference.shape
    if not result.size:
        return 0.0
    return float(np.abs(result - reference).max() / max(np.abs(reference).max(), 1e-30))


def view(order: Sequence[int]) -> int:
    """A permutation as the operators take it."""
    return int("1" + "".join(map(str, order)))
