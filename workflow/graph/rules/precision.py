"""Which operators of ONNX and ONNX Runtime multiply 16-bit values: the products of a run in half precision."""

from __future__ import annotations

from collections.abc import Collection

from onnx import TensorProto

HALVES = frozenset({int(TensorProto.FLOAT16), int(TensorProto.BFLOAT16)})
"""Element types of 16 bits."""
HALF_PRODUCTS: dict[tuple[str, str], frozenset[int]] = {}
"""(Domain, operator) -> the element types of 16 bits in which it multiplies."""


def half_products(*operators: str, domain: str = "", kinds: Collection[int] = HALVES) -> None:
    """Enter operators of a domain. No operator is entered twice."""
    for operator in operators:
        assert (domain, operator) not in HALF_PRODUCTS
        HALF_PRODUCTS[domain, operator] = frozenset(kinds)
