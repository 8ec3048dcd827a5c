"""Activations and other elementwise functions, each right over the whole range of fp32.

Formulas: the ONNX operator's definition; where that has exp of a large positive number, the form that has not.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
from onnx import TensorProto

from ortflow.workflow.graph.writer import Context, Writer


def _hard_sigmoid(w: Writer, x: str, alpha: float, beta: float) -> str:
    line = w("Add", w("Mul", x, w.constant(alpha)), w.constant(beta))
    return w("Clip", line, w.constant(0.0), w.constant(1.0))


def hard_sigmoid(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto]:
    """max(0, min(1, alpha x + beta))."""
    w = Writer(node, context)
    return w.done(_hard_sigmoid(w, w.input(0), w.attribute("alpha", 0.2), w.attribute("beta", 0.5)))


def hard_swish(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto]:
    """x max(0, min(1, x / 6 + 0.5))."""
    w = Writer(node, context)
    return w.done(w("Mul", w.input(0), _hard_sigmoid(w, w.input(0), 1 / 6, 0.5)))


def _softplus(w: Writer, x: str) -> str:
    # In double precision, because 1 + exp of a number below -17 is 1 in single, and the result would be 0.
    far = w("Abs", x)
    small = w("Exp", w("Neg", w("Cast", far, to=TensorProto.DOUBLE)))
    rest = w("Log", w("Add", small, w.constant(1.0, np.float64)))
    # Not by Relu, whose derivative at 0 is 0, where this one's is 1/2.
    positive = w("Mul", w("Add", x, far), w.constant(0.5))
    return w("Add", positive, w("Cast", rest, to=TensorProto.FLOAT))


def softplus(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto]:
    """log(1 + exp x) = max(x, 0) + log(1 + exp -|x|)."""
    w = Writer(node, context)
    return w.done(_softplus(w, w.input(0)))


def mish(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto]:
    """x tanh(softplus x) (Misra 2019)."""
    w = Writer(node, context)
    return w.done(w("Mul", w.input(0), w("Tanh", _softplus(w, w.input(0)))))


def _elu(w: Writer, x: str, alpha: float, inner: float = 1.0) -> str:
    """x for positive x, alpha (exp(x / inner) - 1) for the others."""
    above = w("Greater", x, w.constant(0.0))
    # Not by Min, which halves the derivative at 0.
    negative = w("Where", above, w.constant(0.0), x)
    if inner != 1.0:
        negative = w("Div", negative, w.constant(inner))
    curve = w("Mul", w("Sub", w("Exp", negative), w.constant(1.0)), w.constant(alpha))
    return w("Where", above, x, curve)


def elu(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto]:
    """x, or alpha (exp x - 1) where x <= 0 (Clevert et al. 2015)."""
    w = Writer(node, context)
    return w.done(_elu(w, w.input(0), w.attribute("alpha", 1.0)))


def celu(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto]:
    """x, or alpha (exp(x / alpha) - 1) where x <= 0 (Barron 2017)."""
    w = Writer(node, context)
    alpha = w.attribute("alpha", 1.0)
    return w.done(_elu(w, w.input(0), alpha, alpha))


def selu(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto]:
    """gamma times ELU of alpha (Klambauer et al. 2017)."""
    w = Writer(node, context)
    alpha, gamma = w.attribute("alpha", 1.67326319217681884765625), w.attribute("gamma", 1.05070102214813232421875)
    return w.done(w("Mul", _elu(w, w.input(0), alpha), w.constant(gamma)))


def prelu(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto]:
    """x, or slope x where x <= 0 (He et al. 2015): ONNX's own definition has the derivative 1 at 0."""
    w = Writer(node, context)
    x = w.input(0)
    return w.done(w("Where", w("Greater", x, w.constant(0.0)), x, w("Mul", w.input(1), x)))


def clip(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto]:
    """Clip by comparisons, so that no gradient passes at the limits: ReLU6 at 0, a clamp of what is clamped already."""
    w = Writer(node, context)
    value = w.input(0)
    for place, beyond in ((1, "LessOrEqual"), (2, "GreaterOrEqual")):
        if limit := w.input(place):
            value = w("Where", w(beyond, value, limit), limit, value)
    return w.done(value)


def gelu(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto]:
    """x Phi(x), or its tanh approximation (Hendrycks & Gimpel 2016), in the form ONNX Runtime fuses to one kernel."""
    w = Writer(node, context)
    x = w.input(0)
    if w.attribute("approximate", "none") == "tanh":
        cubic = w("Mul", w("Pow", x, w.constant(3.0)), w.constant(0.044715))
        inner = w("Tanh", w("Mul", w("Add", x, cubic), w.constant(np.sqrt(2 / np.pi))))
        return w.done(w("Mul", w("Mul", x, w.constant(0.5)), w("Add", inner, w.constant(1.0))))
    inner = w("Erf", w("Div", x, w.constant(np.sqrt(2.0))))
    return w.done(w("Mul", w("Mul", x, w("Add", inner, w.constant(1.0))), w.constant(0.5)))


def sign(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto]:
    """1, 0 or -1: comparisons, which stop the gradient as the derivative 0 does."""
    w = Writer(node, context)
    zero = w.constant(0.0)
    above = w("Cast", w("Greater", w.input(0), zero), to=TensorProto.FLOAT)
    below = w("Cast", w("Less", w.input(0), zero), to=TensorProto.FLOAT)
    return w.done(w("Sub", above, below))


def step(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto]:
    """Floor, Ceil or Round (half to even), by whole numbers and comparisons: they stop the gradient, as derivative 0.

    Exact below 2^63, beyond which int64 ends.
    """
    w = Writer(node, context)
    x = w.input(0)
    whole = w("Cast", w("Cast", x, to=TensorProto.INT64), to=TensorProto.FLOAT)
    if node.op_type == "Ceil":
        return w.done(w("Add", whole, _number(w, w("Greater", x, whole))))
    floor = w("Sub", whole, _number(w, w("Less", x, whole)))
    if node.op_type == "Floor":
        return w.done(floor)
    rest, half = w("Sub", x, floor), w.constant(0.5)
    odd = w("Equal", w("Mod", w("Cast", floor, to=TensorProto.INT64), w.constant(2, np.int64)), w.constant(1, np.int64))
    up = w("Or", w("Greater", rest, half), w("And", w("Equal", rest, half), odd))
    return w.done(w("Add", floor, _number(w, up)))


def _number(w: Writer, truth: str) -> str:
    return w("Cast", truth, to=TensorProto.FLOAT)


Activation = Callable[[onnx.NodeProto, Context], list[onnx.NodeProto]]
ACTIVATIONS: dict[str, Activation] = {
    "HardSigmoid": hard_sigmoid,
    "HardSwish": hard_swish,
    "Softplus": softplus,
    "Mish": mish,
    "Elu": elu,
    "Celu": celu,
    "Selu": selu,
    "Gelu": gelu,
    "Sign": sign,
    "PRelu": prelu,
    "Floor": step,
    "Ceil": step,
    "Round": step,
}
