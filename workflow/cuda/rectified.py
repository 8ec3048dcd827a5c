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
    product = rewriter.maker(masked)
    for gradient, condition in _orders(product) if product is not None and product.op_type == "Mul" else ():
        number = _made(rewriter, condition, "Cast")
        compared = _made(rewriter, number.input[0], "Greater") if number is not None else None
        if compared is None or rewriter.number(compared.input[1], compared.input[0]) != 0:
            continue
        # See `images._apart`.
        apart = _made(rewriter, compared.input[0], "Reshape")
        relu = _made(rewriter, apart.input[0] if apart is not None else compared.input[0], "Relu")
        if relu is not None and relu.input[0] == normalised:
            return str(gradient), str(compared.input[1])
    return None


def _orders(product: onnx.NodeProto) -> tuple[tuple[str, str], tuple[str, str]]:
    one, other = product.input
    return (one, other), (other, one)


def _made(rewriter: Rewriter, value: str, operator: str) -> onnx.NodeProto | None:
    node = rewriter.maker(value)
    return node if node is not None and node.op_type == operator and not node.domain else None
