"""The plain recurrent network, which ONNX Runtime cannot differentiate, as a GRU, which it can."""

from __future__ import annotations

import numpy as np
import onnx

from ortflow.workflow.graph.writer import Context, Writer

_SHUT = 1e4
"""A gate's bias at which fp32's sigmoid is 0 or 1 to the last digit or one part in 1e7."""


def rnn(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto]:
    """h' = tanh(W x + R h + b) as the GRU whose update gate is shut and whose reset gate is open.

    A GRU is h' = (1 - z) tanh(W x + r (R h + Rb) + Wb) + z h (ONNX, linear_before_reset=1): with z = 0 and r = 1 it
    is the plain network, and the gates' gradients vanish.
    """
    w = Writer(node, context)
    chosen = [str(name).lower() for name in _texts(w.attribute("activations", []))]
    if any(name != "tanh" for name in chosen) or w.attribute("clip", None) or w.attribute("layout", 0):
        raise w.refusal("only tanh, without clipping, with time as the first axis, can be trained")
    size = int(w.attribute("hidden_size", 0))
    if w.shape(2)[-1] != size:
        raise w.refusal("its hidden_size is not that of its weights")
    directions = 2 if w.attribute("direction", "forward") == "bidirectional" else 1
    weights = []
    for place in (1, 2):
        zero = w("Mul", w.input(place), w.constant(0.0))
        weights.append(w("Concat", zero, zero, w.input(place), axis=1))
    gates = np.zeros((directions, 2 * size), np.float32)
    gates[:, :size], gates[:, size:] = -_SHUT, _SHUT
    nothing = np.zeros((directions, 2 * size), np.float32)
    if w.input(3):
        own = [w("Slice", w.input(3), w.ints(start), w.ints(start + size), w.ints(1)) for start in (0, size)]
    else:
        own = [w.constant(np.zeros((directions, size)))] * 2
    bias = w("Concat", w.constant(gates), own[0], w.constant(nothing), own[1], axis=1)
    outputs = w.several(
        "GRU",
        2,
        w.input(0),
        *weights,
        bias,
        w.input(4),
        w.input(5),
        hidden_size=size,
        linear_before_reset=1,
        direction=w.attribute("direction", "forward"),
    )
    return w.done(*outputs)


def _texts(values: list[bytes | str]) -> list[str]:
    return [value.decode() if isinstance(value, bytes) else value for value in values]
