"""Rules for the types and shapes of operators of ONNX Runtime and of ortflow, which onnx cannot infer."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx

from ortflow.workflow.graph.ir.registry import entered_in

Shape = tuple[int, ...]
Type = tuple[int, Shape]
"""Element type and shape."""
Rule = Callable[[onnx.NodeProto, int, Mapping[str, Type]], Type | None]
"""From a node, the position of one of its outputs, and the types of values by name: the output's; None if unknown."""
SIZES: dict[str, Rule] = {}
"""Operator of any domain but ONNX's own -> its rule."""


def size_rule(*operators: str) -> Callable[[Rule], Rule]:
    """Register a rule for operators. No operator has two."""
    return entered_in(SIZES, *operators)


def first_like_first(node: onnx.NodeProto, place: int, types: Mapping[str, Type]) -> Type | None:
    """Rule for operators whose first output has the type of their first input; nothing is known of the others."""
    return types.get(node.input[0]) if place == 0 and node.input else None
