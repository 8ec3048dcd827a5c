"""How fast this rank's cores compute and move memory at most, measured with ONNX Runtime: the scale of a profile."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import numpy as np
from onnx import TensorProto, helper

from ortflow.workflow.kernels.graph import with_kernels
from ortflow.workflow.run.operator_records import Limits
from ortflow.workflow.sessions.binding import Binding

if TYPE_CHECKING:
    from ortflow.workflow.sessions.session import Sessions

SIDE = 768
"""Of the square matrices that are multiplied: 7 MB, so that the product is bound by the cores."""
ELEMENTS = 8 << 20
"""Of the vectors that are added: 96 MiB with the sum, more than caches hold."""
REPEATS = 5
"""The fastest counts: the machine's limit is wanted, not its average."""


def measured(sessions: Sessions) -> Limits | None:
    """Measure for some tenths of a second, on a CPU. None on other devices, where it is not implemented."""
    if sessions.device.kind != "cpu":
        return None
    forms = {False, sessions.library is not None}
    seconds = min(_seconds(sessions, "MatMul", (SIDE, SIDE), optimized) for optimized in forms)
    return Limits(2 * SIDE**3 / seconds, 12 * ELEMENTS / _seconds(sessions, "Add", (ELEMENTS,), optimized=False))


def _seconds(sessions: Sessions, operator: str, shape: tuple[int, ...], optimized: bool) -> float:
    """Of one run of an operator of two equal shapes; with `optimized`, of our form of it."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "abc"]
    graph = helper.make_graph([helper.make_node(operator, ["a", "b"], ["c"])], "limit", values[:2], values[2:])
    model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])
    binding = Binding(sessions.open((with_kernels(model) if optimized else model).SerializeToString()), sessions.device)
    operands = {name: np.full(shape, 0.5, np.float32) for name in "ab"}
    for name, operand in operands.items():
        binding.feed(name, operand)
    binding.write_to("c", sessions.device.allocate(math.prod(shape), np.float32), shape)
    fastest = float("inf")
    for _ in range(1 + REPEATS):
        start = time.perf_counter()
        binding.run()
        fastest = min(fastest, time.perf_counter() - start)
    return fastest
