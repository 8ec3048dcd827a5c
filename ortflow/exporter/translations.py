"""Translations of PyTorch operators to ONNX that replace PyTorch's own, which are incomplete.

Called by `ortflow.export`, which passes the table to the exporter. PyTorch is installed wherever this is called.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

_LOWEST = -3.4028234663852886e38
"""The smallest number of single precision."""
_REDUCTIONS = ("none", "mean", "sum")


def translations() -> dict[Any, Callable[..., Any]]:
    """PyTorch operator -> the function that writes its ONNX nodes."""
    import torch

    return {
        torch.ops.aten.atan2.default: angle,
        torch.ops.aten.cross_entropy_loss.default: cross_entropy,
        torch.ops.aten.linalg_vector_norm.default: vector_norm,
        torch.ops.aten.sinc.default: sinc,
        torch.ops.aten.scaled_dot_product_attention.default: attention,
    }


def angle(y: Any, x: Any) -> Any:
    """`torch.atan2`, with the signs of zeros, and without a gradient at the origin."""
    # PyTorch's own translation takes +0 for negative, and its quotient has no gradient where x is 0.
    from onnxscript import opset18 as op

    zero, one = (op.CastLike(op.Constant(value_float=number), y) for number in (0.0, 1.0))
    half, pi = (op.CastLike(op.Constant(value_float=number), y) for number in (math.pi / 2, math.pi))
    # -0 is not less than 0, but its reciprocal is minus infinity.
    below, is_left = op.Less(op.Reciprocal(y), zero), op.Less(op.Reciprocal(x), zero)
    steep = op.Greater(op.Abs(y), op.Abs(x))
    under = op.Where(steep, y, x)
    origin = op.Equal(under, zero)
    # Where's gradient is 0 for the branch not taken, and 0 times the infinite derivative of a division by 0 is NaN: so
    # the divisor is replaced, not the quotient.
    quotient = op.Div(op.Where(origin, zero, op.Where(steep, x, y)), op.Where(origin, one, under))
    slope = op.Atan(quotient)
    flat = op.Add(slope, op.Where(is_left, op.Where(below, op.Neg(pi), pi), zero))
    return op.Where(steep, op.Sub(op.Where(below, op.Neg(half), half), slope), flat)


def sinc(x: Any) -> Any:
    """`torch.sinc`: sin(pi x) / (pi x), and 1 at 0, where the gradient is 0 as PyTorch's."""
    from onnxscript import opset18 as op

    zero, one = (op.CastLike(op.Constant(value_float=number), x) for number in (0.0, 1.0))
    origin = op.Equal(x, zero)
    turned = op.Mul(op.Where(origin, one, x), op.CastLike(op.Constant(value_float=math.pi), x))
    return op.Where(origin, one, op.Div(op.Sin(turned), turned))


def vector_norm(x: Any, ord: float = 2.0, dim: Any = None, keepdim: bool = False, dtype: int = -1) -> Any:
    """`torch.linalg.vector_norm`; elements of zero, and a norm of zero, have no gradient, as in PyTorch.

    PyTorch's own translation makes NaN of it, unless the order is 1 or 2.
    """
    from onnxscript import opset18 as op

    if dtype != -1:
        x = op.Cast(x, to=dtype)
    axes = None if dim is None else op.Constant(value_ints=[dim] if isinstance(dim, int) else [*dim])
    if axes is None:
        x, keepdim = op.Reshape(x, op.Constant(value_ints=[-1])), False
    if ord in (1, 2):
        return (op.ReduceL1 if ord == 1 else op.ReduceL2)(x, axes, keepdims=keepdim)
    zero, one = (op.CastLike(op.Constant(value_float=number), x) for number in (0.0, 1.0))
    if math.isinf(ord):
        return (op.ReduceMax if ord > 0 else op.ReduceMin)(op.Abs(x), axes, keepdims=keepdim)
    if ord == 0:
        return op.ReduceSum(op.CastLike(op.Not(op.Equal(x, zero)), x), axes, keepdims=keepdim)
    power, root = (op.CastLike(op.Constant(value_float=number), x) for number in (float(ord), 1 / ord))
    if ord < 0:
        return op.Pow(op.ReduceSum(op.Pow(op.Abs(x), power), axes, keepdims=keepdim), root)
    empty = op.Equal(x, zero)
    powers = op.Where(empty, zero, op.Pow(op.Abs(op.Where(empty, one, x)), power))
    total = op.ReduceSum(powers, axes, keepdims=keepdim)
    nothing = op.Equal(total, zero)
    return op.Where(nothing, zero, op.Pow(op.Where(nothing, one, total), root))


def attention(
    query: Any,
    key: Any,
    value: Any,
    mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """`F.scaled_dot_product_attention` of axes (..., heads, length, width).

    PyTorch's own translation has no dropout, and returns the mean of all values if a mask hides all of them, where
    PyTorch returns zeros.
    """
    from onnxscript import opset18 as op

    rank, width = len(query.shape), query.shape[-1]
    root = op.Sqrt(op.CastLike(op.Constant(value_float=1 / math.sqrt(width) if scale is None else scale), query))
    if enable_gqa and query.shape[-3] != key.shape[-3]:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (_repeated(op, tensor, groups, rank) for tensor in (key, value))
    turned = op.Transpose(key, perm=[*range(rank - 2), rank - 1, rank - 2])
    # Both factors are scaled before the product, as in PyTorch's own (attention.cpp): the product may overflow in
    # halves.
    scores = op.MatMul(op.Mul(query, root), op.Mul(turned, root))
    zero = op.CastLike(op.Constant(value_float=0.0), query)
    is_visible = None
    if is_causal:
        lengths = op.Concat(*(op.Shape(tensor, start=rank - 2, end=rank - 1) for tensor in (query, key)), axis=0)
        later = op.Trilu(op.Expand(op.Constant(value_float=1.0), lengths), op.Constant(value_int=1), upper=1)
        hidden = op.CastLike(op.Constant(value_float=-math.inf), query)
        scores = op.Add(scores, op.Where(op.Cast(later, to=9), hidden, zero))
    elif mask is not None:
        last = op.Constant(value_ints=[-1])
        if mask.dtype.is_floating_point():
            is_visible = op.Greater(op.ReduceMax(mask, last), op.CastLike(op.Constant(value_float=-math.inf), mask))
            mask = op.Where(is_visible, mask, zero)
        else:
            is_visible = op.Cast(op.ReduceMax(op.Cast(mask, to=1), last), to=9)
            # Not minus infinity: Softmax would make NaN of a row without visible keys, which the product with 0 below
            # would keep.
            mask = op.Where(mask, zero, op.CastLike(op.Constant(value_float=_LOWEST), query))
        scores = op.Add(scores, mask)
    weights = op.Softmax(scores, axis=-1)
    if dropout_p:
        weights, _ = op.Dropout(weights, op.Constant(value_float=dropout_p), op.Constant(value=_true()))
    result = op.MatMul(weights, value)
    return result if is_visible is None else op.Mul(result, op.CastLike(is_visible, result))


def _repeated(op: Any, heads: Any, times: int, rank: int) -> Any:
    """Repeat each head for its group of queries."""
    before, count, width = rank - 3, heads.shape[-3], heads.shape[-1]
    many = op.Expand(
        op.Unsqueeze(heads, op.Constant(value_ints=[before + 1])),
        op.Constant(value_ints=[*[1] * (before + 1), times, 1, 1]),
    )
    return op.Reshape(many, op.Constant(value_ints=[*[0] * before, count * times, -1, width]))


def _true() -> Any:
    import numpy as np
    import onnx_ir as ir

    # ONNX's Constant has attributes for floats, integers and strings, but a Boolean needs a tensor.
    return ir.tensor(np.array(True))


def cross_entropy(
    logits: Any,
    target: Any,
    weight: Any = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    """`F.cross_entropy`, classes on axis 1 (axis 0 without a batch), with classes or probabilities as the target.

    PyTorch's own translation drops `label_smoothing` and supports classes only. The formulas are those of
    `cross_entropy_loss` in ATen/native/LossNLL.cpp: with smoothing s and C classes, the loss is
    (1 - s) * nll + s/C * (minus the weighted sum of all log-probabilities), and both means divide by the same weight.
    """
    import onnx_ir as ir
    from onnxscript import opset18 as op

    rank, probabilities = len(logits.shape), target.dtype.is_floating_point()
    if weight is not None:
        weights = op.Reshape(weight, op.Constant(value_ints=[1, -1] + [1] * (rank - 2)))
    if rank == 1:
        first = op.Constant(value_ints=[0])
        logits, target = op.Unsqueeze(logits, first), op.Unsqueeze(target, first)
    if probabilities:
        smooth = target
        if label_smoothing:
            classes = op.CastLike(op.Gather(op.Shape(logits), op.Constant(value_int=1)), logits)
            smooth = op.Add(_times(op, target, 1 - label_smoothing), op.Div(_number(op, label_smoothing), classes))
        terms = op.Mul(smooth, op.LogSoftmax(logits, axis=1))
        terms = op.Mul(terms, weights) if weight is not None else terms
        losses = op.Neg(op.ReduceSum(terms, op.Constant(value_ints=[1]), keepdims=0))
        if reduction == 1:
            result = op.Div(op.ReduceSum(losses, keepdims=0), op.CastLike(op.Size(losses), logits))
        else:
            result = op.ReduceSum(losses, keepdims=0) if reduction == 2 else losses
    else:
        result, _ = op.SoftmaxCrossEntropyLoss(
            logits, target, weight, reduction=_REDUCTIONS[reduction], ignore_index=ignore_index
        )
        if label_smoothing:
            every = op.LogSoftmax(logits, axis=1)
            every = op.Mul(every, weights) if weight is not None else every
            losses = op.Neg(op.ReduceSum(every, op.Constant(value_ints=[1]), keepdims=0))
            ignored = op.Equal(target, op.CastLike(op.Constant(value_int=ignore_index), target))
            zero = op.CastLike(op.Constant(value_float=0.0), logits)
            losses = op.Where(ignored, zero, losses)
            if reduction:
                losses = op.ReduceSum(losses, keepdims=0)
            if reduction == 1:
                counted = op.Cast(op.Not(ignored), to=ir.DataType.FLOAT)
                if weight is not None:
                    first = op.CastLike(op.Constant(value_int=0), target)
                    counted = op.Where(ignored, zero, op.Gather(weight, op.Where(ignored, first, target)))
                losses = op.Div(losses, op.ReduceSum(counted, keepdims=0))
            classes = op.CastLike(op.Gather(op.Shape(logits), op.Constant(value_int=1)), logits)
            share = op.Div(_number(op, label_smoothing), classes)
            result = op.Add(_times(op, result, 1 - label_smoothing), op.Mul(losses, share))
    if rank == 1 and reduction == 0:
        result = op.Squeeze(result, op.Constant(value_ints=[0]))
    return result


def _number(op: Any, value: float) -> Any:
    return op.Constant(value_float=value)


def _times(op: Any, tensor: Any, value: float) -> Any:
    return op.Mul(tensor, _number(op, value))
