"""The pattern of attention: two matrix products with a softmax between them, and what exporters add around them.

Called by `attention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import onnx

from ortflow.workflow.graph.attention.masks import LOW, Condition
from ortflow.workflow.graph.attention.operands import Unfused, View
from ortflow.workflow.graph.ir import shapes, walk
from ortflow.workflow.graph.ir.origin import DROPOUT
from ortflow.workflow.graph.ir.replacement import attribute

BY_TOKENS = [0, 2, 1, 3]
"""Permutation from [batch, heads, tokens, size] to [batch, tokens, heads, size], and back."""
_FAR = -1e8
"""Below LOW, whatever a mask adds to it."""


@dataclass
class Scores:
    """The input of a softmax."""

    product: onnx.NodeProto
    scale: float = 1.0
    added: list[str] = field(default_factory=list)
    conditions: list[Condition] = field(default_factory=list)
    fill: float | None = None
    """The largest number that replaces scores where a condition is false."""


@dataclass
class Guard:
    """Sets rows of the result to 0 for queries that attend to no key. `value` has one element per query."""

    node: onnx.NodeProto
    value: str
    """The condition of a Where, or the factor of a Mul. Empty if rows are replaced where the weights are NaN."""
    place: int = 0
    """Which input of the Where holds the rows."""


@dataclass
class Result:
    """The value that the second product ends in."""

    value: str
    guards: list[Guard]
    by_tokens: bool = False
    """Whether it is [batch, tokens, heads, size]."""


def scores_of(view: View, value: str) -> Scores | None:
    """Match `value` as a scaled and masked matrix product."""
    node = view.maker(value)
    if node is None:
        return None
    if node.op_type == "MatMul":
        return Scores(node)
    if view.alias(node):
        return scores_of(view, node.input[0])
    scaled = view.scaled(node)
    if scaled is not None:
        scores = scores_of(view, scaled[0])
        if scores is not None and (scores.added or scores.conditions):
            raise Unfused("its scores are scaled after the mask")
        if scores is not None:
            scores.scale *= scaled[1]
        return scores
    if node.op_type == "Add":
        for product, mask in (node.input, reversed(node.input)):
            scores = scores_of(view, product)
            if scores is not None:
                if scores.fill is not None and scores.fill > _FAR:
                    raise Unfused("something is added to its scores after the mask")
                scores.added.append(mask)
                return scores
    if node.op_type == "Where":
        condition, yes, no = node.input
        for product, fill, negated in ((yes, no, False), (no, yes, True)):
            number = view.proof.number(fill)
            if number is None or number > LOW:
                continue
            scores = scores_of(view, product)
            if scores is not None:
                scores.conditions.append(Condition(condition, negated))
                scores.fill = max(number, number if scores.fill is None else scores.fill)
                return scores
    return None


@dataclass
class Weights:
    """What happens to the result of a softmax."""

    product: onnx.NodeProto
    guards: list[Guard]
    dropout: tuple[int, float] | None = None
    """Number and ratio of a dropout."""


def weights_of(view: View, value: str) -> Weights | None:
    """Find the product that reads the weights `value`, and the nodes between; None if there is no product nearby."""
    guards: list[Guard] = []
    dropout: tuple[int, float] | None = None
    while True:
        readers = list({id(node): node for node, _ in view.readers.get(value, [])}.values())
        if value in view.outputs or not readers:
            return None
        checks = [node for node in readers if node.op_type == "IsNaN" and not node.domain]
        consumers = [node for node in readers if node not in checks]
        if len(consumers) != 1 or consumers[0].domain:
            return None
        (node,) = consumers
        if node.op_type == "MatMul" and not checks:
            return Weights(node, guards, dropout) if node.input[0] == value and node.input[1] != value else None
        if node.op_type == "Where" and value in node.input[1:]:
            guards.append(_guard(view, node, value, [check.output[0] for check in checks]))
        elif node.op_type == "Dropout" and not view.alias(node):
            if dropout is not None or checks:
                raise Unfused("its weights have several dropouts, or checks before one")
            dropout = _dropout(view, node)
        elif checks or not view.alias(node):
            if any(reader.op_type == "MatMul" for reader, _ in view.readers.get(node.output[0], [])):
                raise Unfused(f"its weights go through {walk.called(node)}")
            return None
        value = node.output[0]


def _dropout(view: View, node: onnx.NodeProto) -> tuple[int, float]:
    """Number and ratio of a Dropout that draws from a seed."""
    number = next((int(prop.value) for prop in node.metadata_props if prop.key == DROPOUT), None)
    ratio = view.proof.number(node.input[1])
    if number is None or ratio is None or not 0 <= ratio < 1:
        raise Unfused("its weights have a dropout that ONNX Runtime draws")
    if len(node.output) > 1 and (view.readers.get(node.output[1]) or node.output[1] in view.outputs):
        raise Unfused("the mask of its weights' dropout is read")
    return number, ratio


def _guard(view: View, node: onnx.NodeProto, value: str, checks: Sequence[str]) -> Guard:
    """Match a Where behind the softmax that replaces whole rows."""
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
    """Find the value that the result ends in, as far as the layout can be changed."""
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
