"""Nodes that several update rules share: moving averages, the two kinds of weight decay, and numbers in double.

In a rule, every reader of an input must be an ancestor of the node that writes its output, or that node: the outputs
have the memory of the inputs.
"""

from __future__ import annotations

from onnx import TensorProto

from ortflow.workflow.optim.builder import Builder


def average(build: Builder, moment: str, value: str, beta: float) -> str:
    """Append `moment` = beta `moment` + (1 - beta) `value`, and return its new value."""
    decayed = build("Mul", moment, build.constant([beta], "float32"))
    added = build("Mul", value, build.constant([1 - beta], "float32"))
    return build("Add", decayed, added, output=f"{moment}.out")


def regularized(build: Builder, parameters: str, gradients: str, decay: float) -> str:
    """The gradient of the loss with L2 regularisation: g + decay w."""
    if not decay:
        return gradients
    return build("Add", gradients, build("Mul", parameters, build.constant([decay], "float32")))


def decayed(build: Builder, parameters: str, decay: float, rate: str) -> str:
    """The weights behind a decoupled decay: w - lr decay w (Loshchilov & Hutter 2019)."""
    if not decay:
        return parameters
    lost = build("Mul", rate, build.constant([decay], "float32"))
    return build("Sub", parameters, build("Mul", parameters, lost))


def double(build: Builder, value: float) -> str:
    """A constant, double [1]."""
    return build.constant([value], "float64")


def single(build: Builder, value: str) -> str:
    """A number in fp32."""
    return build("Cast", value, to=TensorProto.FLOAT)


def steps(build: Builder) -> str:
    """The number of the step, double [1]."""
    return build("Cast", "step", to=TensorProto.DOUBLE)


def correction(build: Builder, beta: float, count: str) -> str:
    """1 - beta^t, double [1], for the step t."""
    # In fp32, 1 - 0.999 is off by 1e-5 of itself.
    return build("Sub", double(build, 1.0), build("Pow", double(build, beta), count))
