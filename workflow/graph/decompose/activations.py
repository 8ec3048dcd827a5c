"""Activations that ONNX defines since opset 18."""

from __future__ import annotations

import numpy as np
import onnx

from ortflow.workflow.graph.ir.replacement import Context, Replacement


def gelu(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto]:
    """x Phi(x), or its tanh approximation (Hendrycks & Gimpel 2016), in the form that ONNX Runtime fuses into one
    kernel.
    """
    w = Replacement(node, context)
    x = w.input(0)
    if w.attribute("approximate", "none") == "tanh":
        cubic = w("Mul", w("Pow", x, w.constant(3.0)), w.constant(0.044715))
        inner = w("Tanh", w("Mul", w("Add", x, cubic), w.constant(np.sqrt(2 / np.pi))))
        return w.done(w("Mul", w("Mul", x, w.constant(0.5)), w("Add", inner, w.constant(1.0))))
    inner = w("Erf", w("Div", x, w.constant(np.sqrt(2.0))))
    return w.done(w("Mul", w("Mul", x, w("Add", inner, w.constant(1.0))), w.constant(0.5)))
