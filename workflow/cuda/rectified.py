"""Finds the gradient of a Relu in front of that of a normalisation. Pure.

Its product with the condition would be stored only to be read twice: by the sums over the batch, and by the gradient of
what was normalised. Where others read it too, as in a network with residual connections, the sums can store it.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx

from ortflow.workflow.graph.ir.rewriter import Rewriter


@dataclass(frozen=True)
class Sum:
    """A gradient that is one + other where `result`, that of a Relu, is larger than zero."""

    one: str
    other: str
    result: str
    product: onnx.NodeProto
    """The node that computes it."""


def before_relu(rewriter: Rewriter, masked: str, normalised: str) -> tuple[str, str] | None:
    """The gradient of a Relu's result, and the zero that the result is compared with.

    Parameters
    ----------
    masked
        The gradient of what the Relu reads: the product of that of its result and the condition, as a number.
    normalised
        What the Relu reads.

    Returns
    -------
    tuple or None
        None if `masked` is something else.
    """
    condition = _condition(rewriter, masked)
    if condition is None:
        return None
    _, gradient, relu, zero = condition
    return (gradient, zero) if relu.input[0] == normalised else None


def sum_before_relu(rewriter: Rewriter, masked: str) -> Sum | None:
    """The two gradients of a Relu's result whose sum, where the condition holds, is `masked`; None if it is not."""
    condition = _condition(rewriter, masked)
    if condition is None:
        return None
    product, gradient, relu, _ = condition
    add, result, dims = rewriter.made_by(gradient, "Add"), str(relu.output[0]), rewriter.dims(masked)
    if add is None or dims is None or any(rewriter.dims(name) != dims for name in (*add.input, result)):
        return None
    # A Transpose back may be left that nobody reads.
    readers = [reader for reader in rewriter.readers(gradient) if reader is not product]
    if gradient in rewriter.outputs or any(rewriter.is_read(name) for node in readers for name in node.output):
        return None
    return Sum(add.input[0], add.input[1], result, product)


def _condition(rewriter: Rewriter, masked: str) -> tuple[onnx.NodeProto, str, onnx.NodeProto, str] | None:
    """The product with the condition, the gradient in it, the Relu, and the zero that its result is compared with."""
    product = rewriter.made_by(masked, "Mul")
    if product is None:
        return None
    for gradient, condition in _orders(product):
        number = rewriter.made_by(condition, "Cast")
        compared = rewriter.made_by(number.input[0], "Greater") if number is not None else None
        if compared is None or rewriter.number(compared.input[1], compared.input[0]) != 0:
            continue
        # See `images._apart`.
        apart = rewriter.made_by(compared.input[0], "Reshape")
        relu = rewriter.made_by(apart.input[0] if apart is not None else compared.input[0], "Relu")
        if relu is not None:
            return product, gradient, relu, str(compared.input[1])
    return None


def _orders(product: onnx.NodeProto) -> tuple[tuple[str, str], tuple[str, str]]:
    first, other = product.input
    return (first, other), (other, first)
