"""A case of the table: a small graph, its inputs, and numpy's result in double precision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

Array = npt.NDArray[Any]
OPSET = 18
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Case:
    """One requirement of a runtime."""

    need: str
    """What a runtime must compute correctly, in a few words; used at the end of a sentence."""
    nodes: Sequence[onnx.NodeProto]
    data: Mapping[str, Array]
    """Inputs of the graph by name; the first axis is the batch."""
    expected: Mapping[str, Array]
    """Outputs by name, in double precision."""
    weights: Mapping[str, Array] = field(default_factory=dict)
    """Names of parameters: inputs of the graph in a rank, constants in an exported file."""
    constants: Mapping[str, Array] = field(default_factory=dict)
    optimizers: Sequence[str] = ()
    """ONNX Runtime's optimiser rewrites that are known to compute it wrongly."""
    tolerance: float = TOLERANCE
    """Largest allowed error relative to the largest expected value."""
    outputs: Mapping[str, int] = field(default_factory=dict)
    """Element types of the outputs that are not fp32."""

    def model(self, *, constant_weights: bool) -> onnx.ModelProto:
        """The graph as in a user's file, with its weights as constants or as inputs."""
        inputs = {**self.data, **({} if constant_weights else self.weights)}
        tensors = {**self.constants, **(self.weights if constant_weights else {})}
        graph = helper.make_graph(
            list(self.nodes),
            "case",
            [
                helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
                for name, array in inputs.items()
            ],
            [
                helper.make_tensor_value_info(name, self.outputs.get(name, TensorProto.FLOAT), array.shape)
                for name, array in self.expected.items()
            ],
            [numpy_helper.from_array(np.asarray(array), name) for name, array in tensors.items()],
        )
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=8)

    def fault(self, results: Mapping[str, Array]) -> str | None:
        """How far the outputs are off, in a few words; None if they are correct."""
        for name, expected in self.expected.items():
            values = np.asarray(results[name], np.float64)
            if values.shape != expected.shape:
                return f"a result of shape {list(values.shape)} for {list(expected.shape)}"
            if not np.array_equal(np.isfinite(values), np.isfinite(expected)):
                return "NaN or infinity instead of a number"
            finite = np.isfinite(expected)
            scale = float(np.abs(expected).max(initial=0.0, where=finite)) or 1.0
            error = float(
                np.abs(np.subtract(values, expected, where=finite, out=np.zeros(values.shape))).max(initial=0.0)
            )
            if not error <= self.tolerance * scale:
                return f"an error of {error / scale:.2g} of the largest value"
        return None


def node(operator: str, inputs: str, outputs: str, **attributes: Any) -> onnx.NodeProto:
    """A node; names are separated by spaces, `-` omits one."""
    names = [[name if name != "-" else "" for name in text.split()] for text in (inputs, outputs)]
    return helper.make_node(operator, *names, f"/{names[1][0]}", **attributes)


def ints(*values: int) -> Array:
    """An int64 vector."""
    return np.array(values, np.int64)


def normal(seed: int, *shape: int) -> Array:
    """Standard normal values, fp32."""
    return np.random.default_rng(seed).standard_normal(shape, np.float32)
