"""Floating-point operations of a node, from its operator and the shapes of one run. Pure.

Matrix products and convolutions alone: the other operators are bound by memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Shape = Sequence[int]

PRODUCTS = frozenset({"FusedGemm", "FusedMatMul", "Gemm", "MatMul", "Product", "TransposeMatMul"})
"""Two matrices, each perhaps transposed, and what is added."""


def flops_of(operator: str, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """Multiplications and additions; 0 if they are not known."""
    if len(inputs) < 2 or not outputs:
        return 0
    if operator in PRODUCTS:
        return _product(inputs[0], inputs[1], outputs[0])
    if operator in ("Conv", "FusedConv"):
        return 2 * math.prod(outputs[0]) * math.prod(inputs[1][1:])
    if operator == "ConvTranspose":
        return 2 * math.prod(inputs[0]) * math.prod(inputs[1][1:])
    return 0


def _product(left: Shape, right: Shape, result: Shape) -> int:
    """Of [batch, m, k] and [batch, k, n], in any order of the axes: |left| |right| = batch m n k^2 batch.

    A matrix without a batch counts once: it multiplies all rows of the other one.
    """
    if min(len(left), len(right)) < 2:
        return 0
    both = math.prod(left) * math.prod(right)
    batch = math.prod(result[:-2]) if len(left) > 2 and len(right) > 2 else 1
    size = math.prod(result) * batch
    if not size or both % size:
        return 0
    inner = math.isqrt(both // size)
    return 2 * math.prod(result) * inner if inner * inner * size == both else 0
