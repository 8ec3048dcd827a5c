"""FusedMatMul, which only ONNX Runtime has, in ONNX operators. Not part of `compose`: it is the faster form."""

from __future__ import annotations

from collections.abc import Callable

from ortflow.workflow.graph.ir import shapes
from ortflow.workflow.graph.ir.replacement import Replacement, copy_of


def product(w: Replacement) -> None:
    """alpha times the product of two factors whose last two axes may be swapped."""
    if any(w.attribute(flag, 0) for flag in ("transBatchA", "transBatchB")) or not _ranks_known(w):
        # Only a model of the user has such nodes: it stays.
        w.nodes.append(copy_of(w.node))
        return
    factors = [_factor(w, place, flag) for place, flag in enumerate(("transA", "transB"))]
    alpha = w.attribute("alpha", 1.0)
    if alpha == 1:
        w("MatMul", *factors, output=w.output(0))
    else:
        w("Mul", w("MatMul", *factors), w.constant(alpha), output=w.output(0))


def _ranks_known(w: Replacement) -> bool:
    return all(shapes.rank(w.context.types, name) is not None for name in w.node.input)


def _factor(w: Replacement, place: int, flag: str) -> str:
    if not w.attribute(flag, 0):
        return w.input(place)
    axes = list(range(w.rank(place)))
    # A vector has no axes to swap.
    return w("Transpose", w.input(place), perm=[*axes[:-2], *axes[:-3:-1]]) if len(axes) > 1 else w.input(place)


PRODUCTS: dict[str, Callable[[Replacement], None]] = {"FusedMatMul": product}
"""Operator of com.microsoft -> the function that writes the nodes that replace it."""
