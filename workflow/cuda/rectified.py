"""Finds the gradient of a Relu in front of that of a normalisation. Pure.

Its product with the condition would be stored only to be read twice: by the sums over the batch, and by the gradient of
what was normalised.
"""

from __future__ import annotations

import onnx

from ortflow.workflow.graph.ir.rewriter import Rewriter


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
    product = rewriter.made_by(masked, "Mul")
    for gradient, condition in _orders(product) if product is not None else ():
        number = rewriter.made_by(condition, "Cast")
        compared = rewriter.made_by(number.input[0], "Greater") if number is not None else None
        if compared is None or rewriter.number(compared.input[1], compared.input[0]) != 0:
            continue
        # See `images._apart`.
        apart = rewriter.made_by(compared.input[0], "Reshape")
        relu = rewriter.made_by(apart.input[0] if apart is not None else compared.input[0], "Relu")
        if relu is not None and relu.input[0] == normalised:
            return str(gradient), str(compared.input[1])
    return None


def _orders(product: onnx.NodeProto) -> tuple[tuple[str, str], tuple[str, str]]:
    one, other = product.input
    return (one, other), (other, one)
