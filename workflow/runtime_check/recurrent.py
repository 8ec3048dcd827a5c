"""Cases of recurrent operators and loops."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from onnx import TensorProto, helper

from ortflow.workflow.runtime_check.case import Array, Case, ints, node, normal

_STEPS, _BATCH, _WIDTH, _HIDDEN = 4, 2, 3, 5


def cases() -> Iterator[Case]:
    """All cases."""
    x = normal(80, _STEPS, _BATCH, _WIDTH)
    for operator, gates, cell in (("LSTM", 4, _lstm), ("GRU", 3, _gru)):
        w, r = normal(81, 2, gates * _HIDDEN, _WIDTH), normal(82, 2, gates * _HIDDEN, _HIDDEN)
        b = normal(83, 2, 2 * gates * _HIDDEN)
        attributes = {"linear_before_reset": 1} if operator == "GRU" else {}
        run = node(operator, "x w r b", "y", hidden_size=_HIDDEN, direction="bidirectional", **attributes)
        ways = [cell(x[:: 1 - 2 * d], w[d], r[d], b[d])[:: 1 - 2 * d] for d in (0, 1)]
        expected = np.stack(ways, axis=1)
        yield Case(f"{operator} in both directions", [run], {"x": x}, {"y": expected}, {"w": w, "r": r, "b": b})
    yield _loop()


def _sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


def _lstm(x: Array, w: Array, r: Array, b: Array) -> Array:
    """[steps, batch, hidden]; gates in ONNX's order: input, output, forget, cell."""
    w, r, b = (a.astype(np.float64) for a in (w, r, b))
    half = len(b) // 2
    h = c = np.zeros((x.shape[1], r.shape[1]))
    values = []
    for step_input in x:
        i, o, f, g = np.split(step_input @ w.T + h @ r.T + b[:half] + b[half:], 4, axis=1)
        c = _sigmoid(f) * c + _sigmoid(i) * np.tanh(g)
        h = _sigmoid(o) * np.tanh(c)
        values.append(h)
    return np.stack(values)


def _gru(x: Array, w: Array, r: Array, b: Array) -> Array:
    """[steps, batch, hidden]; gates in ONNX's order: update, reset, hidden."""
    w, r, b = (a.astype(np.float64) for a in (w, r, b))
    half = len(b) // 2
    h = np.zeros((x.shape[1], r.shape[1]))
    values = []
    for step_input in x:
        wz, wr, wh = np.split(step_input @ w.T + b[:half], 3, axis=1)
        rz, rr, rh = np.split(h @ r.T + b[half:], 3, axis=1)
        z = _sigmoid(wz + rz)
        h = (1 - z) * np.tanh(wh + _sigmoid(wr + rr) * rh) + z * h
        values.append(h)
    return np.stack(values)


def _loop() -> Case:
    """A sum that a Loop carries, and a value of each iteration."""
    body = helper.make_graph(
        [
            helper.make_node("Gather", ["x", "i"], ["row"], axis=0),
            helper.make_node("Add", ["carried", "row"], ["sum"]),
            helper.make_node("Mul", ["sum", "row"], ["each"]),
            helper.make_node("Identity", ["go"], ["on"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("carried", TensorProto.FLOAT, [4]),
        ],
        [
            helper.make_tensor_value_info("on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("sum", TensorProto.FLOAT, [4]),
            helper.make_tensor_value_info("each", TensorProto.FLOAT, [4]),
        ],
    )
    x, start = normal(84, 3, 4), normal(85, 4)
    sums = start + x.astype(np.float64).cumsum(0)
    nodes = [
        node("Shape", "x", "counts", start=0, end=1),
        node("Squeeze", "counts zero", "count"),
        node("Loop", "count - start", "last each", body=body),
    ]
    expected = {"last": sums[-1], "each": sums * x}
    return Case("Loop", nodes, {"x": x}, expected, {"start": start}, {"zero": ints(0)})
