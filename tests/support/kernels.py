"""Single operators of the domain `ortflow` as sessions of their own."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from onnx import TensorProto, helper

from ortflow.workflow.kernels.library import find_library, levels, library_at
from ortflow.workflow.onnx_runtime import onnxruntime as ort

Array = npt.NDArray[Any]
LIBRARY = find_library()
needs_kernels = pytest.mark.skipif(LIBRARY.path is None, reason=f"kernels: {LIBRARY.note}")
_TYPES = {"float32": TensorProto.FLOAT, "int64": TensorProto.INT64}
LEVELS = tuple(levels()) if LIBRARY.path is not None else ()
"""Every set of instructions that the kernels can be compiled for and this processor has."""


@functools.cache
def library_of(level: str) -> Path:
    """The library for a set of instructions; compiled the first time on a machine."""
    library = library_at(level)
    assert library.path is not None, library.note
    return library.path


def compute(
    operator: str,
    *inputs: Array,
    outputs: int = 1,
    threads: int = 2,
    library: Path | None = LIBRARY.path,
    **attributes: Any,
) -> list[Array]:
    """The operator's outputs for the inputs."""
    types = tuple(_TYPES[str(array.dtype)] for array in inputs)
    session = _session(operator, types, outputs, threads, library, tuple(sorted(attributes.items())))
    return list(session.run(None, {f"in.{i}": array for i, array in enumerate(inputs)}))


@functools.lru_cache(maxsize=256)
def _session(
    operator: str,
    types: tuple[int, ...],
    outputs: int,
    threads: int,
    library: Path | None,
    attributes: tuple[tuple[str, Any], ...],
) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.register_custom_ops_library(str(library))
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    # Hundreds of sessions are kept: their threads must not spin beside the active one.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    given, made = [f"in.{i}" for i in range(len(types))], [f"out.{i}" for i in range(outputs)]
    graph = helper.make_graph(
        [helper.make_node(operator, given, made, domain="ortflow", **dict(attributes))],
        "operator",
        [_value(name, element) for name, element in zip(given, types, strict=True)],
        [_value(name, TensorProto.FLOAT) for name in made],
    )
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("ortflow", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=9)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


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
    """A permutation as the operators' attribute."""
    return int("1" + "".join(map(str, order)))
