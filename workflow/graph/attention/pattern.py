"""The pattern of attention: two products with a softmax between, and what exporters put around them.

Called by `attention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import onnx

from ortflow.workflow.graph.attention.masks import LOW, Condition
from ortflow.workflow.graph.attention.operands import Unfused, View
from ortflow.workflow.graph.ir import shapes, walk
from ortflow.workflow.graph.ir.replacement import attribute

BY_TOKENS = [0, 2, 1, 3]
"""From [batch, heads, tokens, size] to [batch, tokens, heads, size], and back."""
_FAR = -1e8
"""Below LOW, whatever a mask adds to it."""


@dataclass
class Scores:
    """What a softmax is taken of."""

    product: onnx.NodeProto
    scale: float = 1.0
    added: list[str] = field(default_factory=list)
    conditions: list[Condition] = field(default_factory=list)
    fill: float | None = None
    """The largest number in place of scores where a condition does not hold."""


@dataclass
class Guard:
    """What makes rows of the result 0 where a query looks at no key: `value` is by query."""

    node: onnx.NodeProto
    value: str
    """The condition of a Where, or the factor of a Mul; empty where it is that the weights are not numbers."""
    place: int = 0
    """Which input of a Where the rows are."""


@dataclass
class Result:
    """Where the result of the second product goes."""

    value: str
    guards: list[Guard]
    by_tokens: bool = False
    """It is [batch, tokens, heads, size]."""


def scores_of(view: View, value: str) -> Scores | None:
    """What `value` is, where it is a scaled and masked product of matrices."""
    node = view.maker(value)
    if node is None:
        return None
    if node.op_type == "MatMul":
        return Scores(node)
    if view.alias(node):
        return scores_of(view, node.input[0])
    scaled = view.scaled(node)
    if scaled is not None:
        found = scores_of(view, scaled[0])
        if found is not None and (found.added or found.conditions):
            raise Unfused("its scores are scaled after the mask")
        if found is not None:
            found.scale *= scaled[1]
        return found
    if node.op_type == "Add":
        for product, mask in (node.input, reversed(node.input)):
            found = scores_of(view, product)
            if found is not None:
                if found.fill is not None and found.fill > _FAR:
                    raise Unfused("something is added to its scores after the mask")
                found.added.append(mask)
                return found
    if node.op_type == "Where":
        condition, yes, no = node.input
        for product, fill, negated in ((yes, no, False), (no, yes, True)):
            number = view.proof.number(fill)
            if number is None or number > LOW:
                continue
            found = scores_of(view, product)
            if found is not None:
                found.conditions.append(Condition(condition, negated))
                found.fill = max(number, number if found.fill is None else found.fill)
                return found
    return None


def weights_of(view: View, value: str) -> tuple[onnx.NodeProto, list[Guard]] | None:
    """The product that reads the weights `value`, and what stands between; None if no product is near."""
    guards: list[Guard] = []
    while True:
        readers = list({id(node): node for node, _ in view.readers.get(value, [])}.values())
        if value in view.outputs or not readers:
            return None
        checks = [node for node in readers if node.op_type == "IsNaN" and not node.domain]
        others = [node for node in readers if node not in checks]
        if len(others) != 1 or others[0].domain:
            return None
        (node,) = others
        if node.op_type == "MatMul" and not checks:
            return (node, guards) if node.input[0] == value and node.input[1] != value else None
        if node.op_type == "Where" and value in node.input[1:]:
            guards.append(_guard(view, node, value, [check.output[0] for check in checks]))
        elif node.op_type == "Dropout" and not view.alias(node):
            raise Unfused("its weights have dropout")
        elif checks or not view.alias(node):
            if any(each.op_type == "MatMul" for each, _ in view.readers.get(node.output[0], [])):
                raise Unfused(f"its weights go through {walk.called(node)}")
            return None
        value = node.output[0]


def _guard(view: View, node: onnx.NodeProto, value: str, checks: Sequence[str]) -> Guard:
    """What a Where behind the softmax does with whole rows."""
    place = 1 if node.input[1] == value else 2
    if view.proof.number(node.input[3 - place]) != 0:
        raise Unfused(f"its weights go through {walk.called(node)}")
    if list(checks) == [node.input[0]]:
        if place == 1:
            raise Unfused(f"its weights go through {walk.called(node)}")
        return Guard(node, "", place)
    if checks or view.dims(node.input[0])[-1:] != [1]:
        raise Unfused(f"its weights go through {walk.called(node)}")
    return Guard(node, node.input[0], place)


def result_of(view: View, value: str, guards: list[Guard]) -> Result:
    """Where the result goes, as far as it can be had otherwise."""
    result = Result(value, list(guards))
    while not result.by_tokens:
        readers = view.readers.get(result.value, [])
        if len(readers) != 1 or result.value in view.outputs:
            break
        node, place = readers[0]
        if node.domain or place < 0:
            break
        if node.op_type == "Transpose" and list(attribute(node, "perm", [])) == BY_TOKENS:
            result.by_tokens = True
        elif node.op_type == "Mul" and _is_by_row(view, node.input[1 - place]):
            result.guards.append(Guard(node, node.input[1 - place]))
        elif not view.alias(node) or place:
            break
        result.value = node.output[0]
    return result


def _is_by_row(view: View, name: str) -> bool:
    dims = shapes.named_shape(view.types, name)
    return dims is not None and len(dims) == 4 and dims[-1] == 1 and view.proof.number(name) is None
