"""Floating-point operations of a node, from its operator and the shapes of one run. Pure.

Matrix products and convolutions alone: the other operators are bound by memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Shape = Sequence[int]

PRODUCTS = frozenset({"FusedGemm", "FusedMatMul", "Gemm", "MatMul", "Product"})
"""Two matrices, each perhaps transposed, and what is added."""
CONVOLUTIONS = frozenset({"Conv", "ConvTranspose", "FusedConv"})


def flops_of(operator: str, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int | None:
    """Multiplications and additions; 0 of other operators, None if the shapes do not determine them."""
    if operator not in PRODUCTS | CONVOLUTIONS:
        return 0
    if len(inputs) < 2 or not outputs:
        return None
    if operator in PRODUCTS:
        return _product(inputs[0], inputs[1], outputs[0])
    larger = inputs[0] if operator == "ConvTranspose" else outputs[0]
    return 2 * math.prod(larger) * math.prod(inputs[1][1:])


def _product(first: Shape, right: Shape, result: Shape) -> int | None:
    """Of `batch` products of [m, k] and [k, n], in any order of the axes: |left| |right| / |result| = batch k^2.

    Operators of ours also read matrices with the heads between other axes, so the batch is what makes k an axis of
    both. None if that is not the case for exactly one k.
    """
    size = math.prod(result)
    if not size or min(len(first), len(right)) < 2:
        return None
    sizes, inner_sizes = math.prod(first) * math.prod(right), set()
    for batch in {1, *(math.prod(shape[:-2]) for shape in (first, right, result))}:
        inner = math.isqrt(sizes // (size * batch))
        if inner * inner * size * batch == sizes and all(
            inner in shape or inner in (math.prod(shape[:-1]), math.prod(shape[1:])) for shape in (first, right)
        ):
            inner_sizes.add(inner)
    return 2 * size * inner_sizes.pop() if len(inner_sizes) == 1 else None
