"""Translations of PyTorch operators to ONNX that replace PyTorch's own, which leave something out.

Called by `ortflow.export`, which passes the table to the exporter. PyTorch is installed wherever this is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_REDUCTIONS = ("none", "mean", "sum")


def translations() -> dict[Any, Callable[..., Any]]:
    """PyTorch operator -> the function that writes its ONNX nodes."""
    import torch

    return {torch.ops.aten.cross_entropy_loss.default: cross_entropy}


def cross_entropy(
    logits: Any,
    target: Any,
    weight: Any = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    """`F.cross_entropy`, classes on axis 1 (axis 0 without a batch), with classes or probabilities as the target.

    PyTorch's own translation drops `label_smoothing` and knows classes only. The formulas are those of
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
        each = op.Mul(smooth, op.LogSoftmax(logits, axis=1))
        each = op.Mul(each, weights) if weight is not None else each
        losses = op.Neg(op.ReduceSum(each, op.Constant(value_ints=[1]), keepdims=0))
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
