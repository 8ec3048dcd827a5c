"""Finds the updates of running statistics that `graph.objective.modes` writes behind a BatchNormalization. Pure.

new = momentum old + fresh batch, where batch is the batch's mean, or its unbiased variance: count / max(count - 1, 1)
times the variance.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import onnx

from ortflow.workflow.graph.ir.rewriter import Dims, Rewriter


@dataclass(frozen=True)
class Update:
    """How a running statistic moves."""

    old: str
    new: str
    momentum: float
    fresh: float
    """Both as the graph has them: 1 - momentum was rounded there."""
    makers: tuple[onnx.NodeProto, ...]
    """The nodes that make `new`. What only these read is not needed without them."""


def correction_of(rewriter: Rewriter, images: Collection[str], mean: str, variance: str) -> onnx.NodeProto | None:
    """The node of the factor from the variance to the unbiased one; `images`: the names of what is normalised."""
    for reader in rewriter.readers(variance):
        for name in reader.input if _is(reader, "Mul") else ():
            ratio = rewriter.made_by(name, "Div")
            if ratio is not None and _is_correction(rewriter, ratio, images, mean):
                return ratio
    return None


def updates_of(
    rewriter: Rewriter, node: onnx.NodeProto, correction: str, channels: Dims
) -> tuple[Update, Update] | None:
    """The updates of both running statistics of a BatchNormalization; None if they are not the usual ones."""
    _, mean, variance = node.output
    of_mean = _update(rewriter, mean, channels)
    unbiased = _products(rewriter, variance, correction)
    of_variance = _update(rewriter, unbiased[0].output[0], channels) if len(unbiased) == 1 else None
    if of_mean is None or of_variance is None:
        return None
    alike = (of_mean.momentum, of_mean.fresh) == (of_variance.momentum, of_variance.fresh)
    before = rewriter.needed_by([of_mean.old, of_variance.old])
    return (of_mean, of_variance) if alike and id(node) not in before else None


def _update(rewriter: Rewriter, batch: str, channels: Dims) -> Update | None:
    for scaled in rewriter.readers(batch):
        fresh = _factor(rewriter, scaled, batch)
        add = rewriter.only_reader(scaled.output[0])
        if fresh is None or add is None or not _is(add, "Add"):
            continue
        for name in add.input:
            product = rewriter.made_for(add, name, "Mul")
            if product is None or product is scaled:
                continue
            for old in product.input:
                momentum = _factor(rewriter, product, old)
                if momentum is not None and rewriter.is_fp32(old) and rewriter.dims(old) == channels:
                    makers = _makers(rewriter, add)
                    return Update(old, makers[-1].output[0], momentum, fresh, makers)
    return None


def _makers(rewriter: Rewriter, add: onnx.NodeProto) -> tuple[onnx.NodeProto, ...]:
    """The node, and the copy of its result if that is all that the graph does with it."""
    copy = rewriter.only_reader(add.output[0])
    is_end = copy is not None and _is(copy, "Identity") and copy.output[0] in rewriter.outputs
    return (add, copy) if copy is not None and is_end else (add,)


def _factor(rewriter: Rewriter, node: onnx.NodeProto, value: str) -> float | None:
    """The constant that a node multiplies a value with."""
    if not _is(node, "Mul") or list(node.input).count(value) != 1:
        return None
    return rewriter.number(next(name for name in node.input if name != value), value)


def _products(rewriter: Rewriter, value: str, factor: str) -> list[onnx.NodeProto]:
    factors = {value, factor}
    return [node for node in rewriter.readers(value) if _is(node, "Mul") and set(node.input) == factors]


def _is_correction(rewriter: Rewriter, ratio: onnx.NodeProto, images: Collection[str], mean: str) -> bool:
    """Whether a node divides the number of a channel's elements by one less, or by one."""
    count, fewer = rewriter.made_by(ratio.input[0], "Cast"), rewriter.made_by(ratio.input[1], "Max")
    if count is None or fewer is None:
        return False
    elements, less = rewriter.made_by(count.input[0], "Div"), rewriter.made_by(fewer.input[0], "Sub")
    if elements is None or less is None:
        return False
    ones = less.input[1], *fewer.input[1:]
    if less.input[0] != ratio.input[0] or len(ones) != 2 or any(rewriter.number(unit, mean) != 1 for unit in ones):
        return False
    size, width = (rewriter.made_by(name, "Size") for name in elements.input)
    return size is not None and width is not None and size.input[0] in images and width.input[0] == mean


def _is(node: onnx.NodeProto, operator: str) -> bool:
    return bool(node.op_type == operator and not node.domain)
