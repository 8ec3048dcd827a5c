"""Requirements beyond the result of a graph: order of nodes, memory that is read and written, repeatability."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper

from ortflow.workflow.device.cpu import CpuDevice, HostBuffer
from ortflow.workflow.onnx_runtime import onnxruntime
from ortflow.workflow.optim.gradient import gradient_graph
from ortflow.workflow.optim.graph import optimizer_graph
from ortflow.workflow.optim.segments import Segment
from ortflow.workflow.runtime_check.case import OPSET, Array, node, normal
from ortflow.workflow.sessions.binding import Binding
from ortflow.workflow.sessions.session import Sessions
from ortflow.workflow.spec.optimizers import Sgd

_COUNT = 1 << 15
"""Elements of a flat buffer: enough to be shared by several threads."""


@dataclass(frozen=True)
class Behaviour:
    """One requirement; `fault` returns what is wrong, None if nothing is."""

    need: str
    fault: Callable[[Sessions], str | None]
    optimizers: tuple[str, ...] = ()


def _bound(sessions: Sessions, model: onnx.ModelProto, memory: Mapping[str, Array], places: Mapping[str, str]) -> None:
    """Run a graph over vectors: inputs by name, outputs into the arrays of `places`."""
    binding = Binding(sessions.open(model.SerializeToString()), CpuDevice())
    for name in binding.inputs:
        binding.read_from(name, HostBuffer(memory[name]), memory[name].shape)
    for name in binding.outputs:
        binding.write_to(name, HostBuffer(memory[places[name]]), memory[places[name]].shape)
    binding.run()


def _order(sessions: Sessions) -> str | None:
    """Two independent nodes, one writing where the other reads: they must run in the listed order."""
    for order in ((0, 1), (1, 0)):
        nodes = (node("Neg", "x", "a"), node("Add", "x x", "b"))
        values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [_COUNT]) for name in "xab"]
        graph = helper.make_graph([nodes[i] for i in order], "order", values[:1], values[1:])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)
        x = normal(90, _COUNT)
        exact = -x if order == (0, 1) else -2 * x
        a = np.zeros_like(x)
        _bound(sessions, model, {"x": x, "a": a}, {"a": "a", "b": "x"})
        if not np.array_equal(a, exact):
            return "another order"
    return None


def _update(sessions: Sessions) -> str | None:
    """Gradient descent with momentum over flat buffers, in place."""
    rate, momentum, decay = 0.1, 0.9, 0.01
    rule = Sgd(name="sgd", lr=rate, momentum=momentum, weight_decay=decay)
    model = optimizer_graph(rule, [Segment(0, _COUNT, decay)])
    memory: dict[str, Array] = {
        "learning_rate": np.array([rate], np.float32),
        "step": np.array([3], np.int64),
        **{value.name: normal(91 + i, _COUNT) for i, value in enumerate(model.graph.input) if "." in value.name},
    }
    (moment,) = (name for name in memory if name.startswith("momentum"))
    p, g, m = (memory[name].astype(np.float64) for name in ("parameters.0", "gradients.0", moment))
    m = momentum * m + g + decay * p
    places = {value.name: value.name.removesuffix(".out") for value in model.graph.output}
    _bound(sessions, model, memory, places)
    error = max(
        float(np.abs(memory[name] - exact).max()) for name, exact in (("parameters.0", p - rate * m), (moment, m))
    )
    return None if error <= 1e-5 else f"an error of {error:.2g}"


def _clip(sessions: Sessions) -> str | None:
    """Gradients scaled and clipped in place, with their norm."""
    gradients = normal(95, _COUNT)
    norm = float(np.linalg.norm(gradients.astype(np.float64))) * 0.5
    exact = gradients.astype(np.float64) * 0.5 / (norm + 1e-6)
    memory = {"gradients": gradients, "inverse_weight": np.array([0.5], np.float32)}
    memory |= {"max_norm": np.ones(1, np.float32), "norm": np.zeros(1, np.float32)}
    _bound(sessions, gradient_graph(), memory, {"gradients.out": "gradients", "norm": "norm"})
    error = max(float(np.abs(gradients - exact).max()), abs(float(memory["norm"][0]) / norm - 1))
    return None if error <= 1e-6 else f"an error of {error:.2g}"


def _repeated(sessions: Sessions) -> str | None:
    """The same bits in every run and every session."""
    nodes = [
        node("MatMul", "x w", "p"),
        node("Softmax", "p", "s", axis=-1),
        node("ReduceSum", "s", "t", keepdims=0),
        node("Dropout", "s half training", "d mask"),
    ]
    fixed = {"half": np.float32(0.5), "training": np.bool_(True), "w": normal(96, 256, 96)}
    graph = helper.make_graph(
        nodes,
        "repeated",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [64, 256])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("s", "t", "d")],
        [onnx.numpy_helper.from_array(np.asarray(array), name) for name, array in fixed.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8).SerializeToString()
    x, runs = normal(97, 64, 256), []
    for _ in range(2):
        binding = Binding(sessions.open(model), CpuDevice())
        binding.feed("x", x)
        for _ in range(2):
            onnxruntime.set_seed(98)
            runs.append([array.tobytes() for array in binding.fetch(["s", "t", "d"])])
        s, _, d = (np.frombuffer(data, np.float32) for data in runs[-1])
        if not np.allclose(d[d != 0], 2 * s[d != 0]) or not 0.4 < float((d != 0).mean()) < 0.6:
            return "a mask without effect"
    # Dropout's random numbers continue from run to run within a session, so only sessions are compared.
    return None if runs[0] == runs[2] and runs[1] == runs[3] else "other bits"


BEHAVIOURS = (
    Behaviour("nodes in the order in which they are listed", _order),
    Behaviour("an optimizer that writes to its inputs", _update),
    Behaviour("a gradient that is clipped in place", _clip),
    Behaviour("repeatable results and dropout masks", _repeated),
)
