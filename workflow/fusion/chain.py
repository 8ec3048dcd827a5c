"""What the nodes of a group compute together, where a cheaper form of it is as exact as halves can show. Pure.

Gelu is x (1 + erf(x / sqrt(2))) / 2, and its derivative has exp(-x x / 2) beside the erf, which is computed from the
same power.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import onnx

_ALIKE = 1e-6
"""Largest relative difference of two factors that are the same number, rounded."""


class Chain:
    """The nodes of a group; `constants` are the scalars they read, and `outputs` the values that others read."""

    def __init__(
        self, nodes: Sequence[onnx.NodeProto], constants: Mapping[str, float], outputs: Collection[str]
    ) -> None:
        self._constants, self._outputs = constants, outputs
        self._makers = {node.output[0]: node for node in nodes}
        self._readers: dict[str, list[onnx.NodeProto]] = {}
        for node in nodes:
            for name in node.input:
                self._readers.setdefault(name, []).append(node)

    def is_added_to_one(self, value: str) -> bool:
        """Whether all that is computed from a value up to 1 is its sum with a number as large as it can be, or larger.

        Digits that it has near 0 are lost in the sum.
        """
        return value not in self._outputs and all(self._adds(node, value, 1.0) for node in self._readers[value])

    def _adds(self, node: onnx.NodeProto, value: str, most: float) -> bool:
        factors = [self._constants.get(name) for name in node.input if name != value]
        if len(factors) != 1 or factors[0] is None:
            return False
        if node.op_type == "Add":
            return abs(factors[0]) >= most
        product = node.output[0]
        return (
            node.op_type == "Mul"
            and product not in self._outputs
            and all(self._adds(reader, product, most * abs(factors[0])) for reader in self._readers.get(product, ()))
        )

    def squared(self, value: str, of: Iterable[str]) -> str | None:
        """The one of the values `of` whose square is minus this value; None if there is none."""
        factor, square = self._scaled(value)
        node = self._makers.get(square)
        if node is None or node.op_type != "Mul" or node.input[0] != node.input[1]:
            return None
        inner, root = self._scaled(node.input[0])
        for candidate in of:
            other, base = self._scaled(candidate)
            if base == root and math.isclose(-factor * inner * inner, other * other, rel_tol=_ALIKE):
                return candidate
        return None

    def _scaled(self, value: str) -> tuple[float, str]:
        """A factor and a value whose product it is, as far as factors are known."""
        node = self._makers.get(value)
        if node is not None and node.op_type in ("Mul", "Neg"):
            factors = [self._constants.get(name) for name in node.input]
            for place, factor in enumerate(factors):
                if node.op_type == "Mul" and factor is not None and factors[1 - place] is None:
                    rest, base = self._scaled(node.input[1 - place])
                    return factor * rest, base
            if node.op_type == "Neg" and factors[0] is None:
                rest, base = self._scaled(node.input[0])
                return -rest, base
        return 1.0, value
