"""ONNX Runtime's AdamOptimizer in ONNX operators; see `compose`."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import TensorProto, helper

from ortflow.workflow.graph.ir.replacement import Replacement
from ortflow.workflow.graph.rules.composition import composition


@composition("AdamOptimizer")
def adam(w: Replacement) -> None:
    """AdamOptimizer(rate, step, parameters, gradients, moment_1, moment_2) as `optim.adam` creates it.

    It has bias correction and `weight_decay_mode` 0. Outputs may share the memory of their inputs, so each node that
    reads an input comes before, or is, the node that writes the output. Output 0, the incremented step, is omitted.
    """
    assert (w.attribute("do_bias_correction", 1), w.attribute("weight_decay_mode", 0)) == (1, 0)
    rate, step, parameters, gradients, first, second = w.node.input
    beta_1, beta_2 = w.attribute("alpha", 0.9), w.attribute("beta", 0.999)
    first = _moment(w, first, gradients, beta_1, w.output(1))
    second = _moment(w, second, w("Mul", gradients, gradients), beta_2, w.output(2))
    # In single precision 1 - 0.999 is off by 1.3e-5 of its value.
    steps = w("Cast", step, to=TensorProto.DOUBLE)
    correction_1, correction_2 = (
        w("Sub", _double(w, 1.0), w("Pow", _double(w, beta), steps)) for beta in (beta_1, beta_2)
    )
    # m' / (c1 (sqrt(v') / sqrt(c2) + epsilon)), with the scalar factors multiplied first.
    factor = _single(w, w("Div", correction_1, w("Sqrt", correction_2)))
    epsilon = _single(w, w("Mul", correction_1, _double(w, w.attribute("epsilon", 1e-8))))
    denominator = w("Add", w("Mul", w("Sqrt", second), factor), epsilon)
    change = w("Div", w("Mul", first, rate), denominator)
    decay = w.attribute("lambda", 0.0)
    if decay:
        # Applied separately and before the step, so that the decayed parameter is rounded once.
        lost = w("Mul", rate, w.constant(decay))
        if w.output(4):
            change = w("Add", change, w("Mul", parameters, lost))
        else:
            parameters = w("Sub", parameters, w("Mul", parameters, lost))
    if w.output(4):
        _write(w, "Neg", change, output=w.output(4))
    if w.output(3):
        _write(w, "Sub", parameters, change, output=w.output(3))


def _moment(w: Replacement, moment: str, value: str, beta: float, output: str) -> str:
    return _write(w, "Add", w("Mul", moment, w.constant(beta)), w("Mul", value, w.constant(1 - beta)), output=output)


def _write(w: Replacement, operator: str, *inputs: str, output: str) -> str:
    """A node that writes an output of the replaced node, without a further pass over its memory."""
    w.nodes.append(helper.make_node(operator, inputs, [output], f"{output}/{operator}"))
    return output


def _double(w: Replacement, value: Any) -> str:
    return w.constant(value, np.float64)


def _single(w: Replacement, value: str) -> str:
    return w("Cast", value, to=TensorProto.FLOAT)
