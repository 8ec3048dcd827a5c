"""Values whose gradient may be infinite where they are 0: what roots, logarithms and quotients are computed from.

Called by `reverse`. PyTorch's ReLU drops such a gradient where its output is 0; infinity times 0 would be NaN.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import numpy_helper

from ortflow.workflow.graph.operators.families import Trait, having

_PASSES = having(Trait.PASSES_STEEPNESS)


def steep_values(graph: onnx.GraphProto, tensors: Mapping[str, onnx.TensorProto]) -> set[str]:
    """Names of such values. `tensors`: constants, by name; a sum with a constant is not 0 where the other term is."""
    steep: set[str] = set()
    for node in reversed(graph.node):
        if node.domain != "":
            continue
        if node.op_type in ("Log", "Reciprocal", "Sqrt") or (node.op_type == "Pow" and not _is_smooth(node, tensors)):
            steep.add(node.input[0])
        elif node.op_type == "Div":
            steep.add(node.input[1])
        passes = node.op_type in _PASSES or (node.op_type == "Add" and not any(n in tensors for n in node.input))
        if passes and not steep.isdisjoint(node.output):
            steep.update(node.input)
    return steep


def _is_smooth(node: onnx.NodeProto, tensors: Mapping[str, onnx.TensorProto]) -> bool:
    """Whether a power's exponents are constant and at least 1."""
    exponent = tensors.get(node.input[1])
    return exponent is not None and bool(np.all(numpy_helper.to_array(exponent) >= 1))
