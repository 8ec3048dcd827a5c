"""Summed cross-entropy of rows of logits with class labels, and its gradient; see cross_entropy.cu.

CrossEntropy (labels, logits) -> the sum of the losses (fp32 []), and for each row the logarithm of the sum of the
exponentials (fp32 [rows]); CrossEntropyGrad (labels, gradient, logits, these logarithms) -> dlogits, where the gradient
is one fp32. CrossEntropyWithGrad (labels, gradient, logits) -> the sum, dlogits: both in one pass over the logits, if a
row fits into the threads of a block. Rows with the label `ignore` do not count. Logits and dlogits may be half.
Probabilities are not stored.

If the logits are those of some of `total` classes, from class `start` on, as a part of a divided model has them:
CrossEntropyShare (labels, logits) -> for each row the largest logit, the sum of the exponentials of the logits minus
it, and the logit of the label, 0 if it is another part's. CrossEntropyGrad then takes the logarithms over all classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import c_int, c_int64, c_void_p
from typing import Any

from onnx import TensorProto

from ortflow.workflow.cuda.call import Call, Tensor
from ortflow.workflow.cuda.registry import operator
from ortflow.workflow.cuda.source import BYTES, blocks, rows_and_width, size_of, source
from ortflow.workflow.errors import OrtflowError

_NO_LABEL = -(2**63)
_WARP, _BLOCK = 32, 256
_REGISTERS, _SHARED = 32, 45 << 10
"""Words of a row's scores that a thread keeps in registers, and bytes that a block keeps in shared memory, at most."""


class _Loss:
    def __init__(self, attributes: Mapping[str, Any]) -> None:
        self._ignore = c_int64(int(attributes.get("ignore", _NO_LABEL)))
        self._start, self._total = int(attributes.get("start", 0)), attributes.get("total")

    def _classes(self, count: int) -> tuple[c_int64, c_int64]:
        """The first class of the logits, and the number of all classes, if `count` of them have logits."""
        return c_int64(self._start), c_int64(count if self._total is None else int(self._total))


@operator(half_inputs=(1,))
class CrossEntropy(_Loss):
    """See the module's docstring."""

    def run(self, call: Call) -> None:
        """A label that is neither a class nor ignored makes the sum NaN."""
        labels, scores = call.given(0), call.given(1)
        rows, _ = _sizes(labels, scores)
        out, lse = call.output(0, ()), call.output(1, (rows,))
        losses = call.scratch(4 * max(rows, 1))
        self._forward(call, labels, scores, lse, losses)
        _total(call, losses, out, rows)

    def _forward(self, call: Call, labels: Tensor, scores: Tensor, lse: int, losses: int) -> None:
        rows, classes = rows_and_width(scores)
        group, block = _threads(classes)
        text = source("cross_entropy", (("X", scores.type),), (("GROUP", group), ("BLOCK", block)))
        if rows:
            call.launch(
                text, "cross_entropy", blocks(rows, block // group), block,
                *map(c_void_p, (labels.pointer, scores.pointer, lse, losses)),
                self._ignore, c_int64(rows), c_int(classes),
            )  # fmt: skip


@operator(half_inputs=(1,))
class CrossEntropyShare(_Loss):
    """See the module's docstring."""

    def run(self, call: Call) -> None:
        """The logit of a label that is neither a class nor ignored is NaN."""
        labels, scores = call.given(0), call.given(1)
        rows, classes = _sizes(labels, scores)
        results = [call.output(place, (rows,)) for place in range(3)]
        if not rows:
            return
        group, block = _threads(classes)
        text = source("cross_entropy", (("X", scores.type),), (("GROUP", group), ("BLOCK", block)))
        call.launch(
            text, "cross_entropy_share", blocks(rows, block // group), block,
            *map(c_void_p, (labels.pointer, scores.pointer, *results)),
            self._ignore, *self._classes(classes), c_int64(rows), c_int(classes),
        )  # fmt: skip


@operator(half_inputs=(2,), half_outputs=(0,))
class CrossEntropyGrad(_Loss):
    """See the module's docstring."""

    def run(self, call: Call) -> None:
        """A label that is neither a class nor ignored makes the row's gradient NaN."""
        labels, gradient, scores, lse = (call.given(place) for place in range(4))
        rows, _ = _sizes(labels, scores)
        if size_of(gradient) != 1 or size_of(lse) != rows:
            raise OrtflowError(f"the gradient is {list(gradient.shape)}, and the logarithms are {list(lse.shape)}")
        dscores = call.output(0, scores.shape)
        self._backward(call, labels, gradient, scores, lse.pointer, dscores, call.types[0])

    def _backward(
        self, call: Call, labels: Tensor, gradient: Tensor, scores: Tensor, lse: int, dscores: int, kind: int
    ) -> None:
        rows, classes = rows_and_width(scores)
        if not rows * classes:
            return
        group, block = _threads(classes)
        types = (("X", scores.type), ("D", kind))
        text = source("cross_entropy_gradient", types, (("GROUP", group), ("BLOCK", block)))
        call.launch(
            text, "cross_entropy_gradient", blocks(rows, block // group), block,
            *map(c_void_p, (labels.pointer, gradient.pointer, scores.pointer, lse, dscores)),
            self._ignore, *self._classes(classes), c_int64(rows), c_int(classes),
        )  # fmt: skip


@operator()
class CrossEntropyWithGrad(CrossEntropy, CrossEntropyGrad):
    """See the module's docstring."""

    def run(self, call: Call) -> None:
        """See the two operators."""
        labels, gradient, scores = (call.given(place) for place in range(3))
        rows, classes = _sizes(labels, scores)
        if size_of(gradient) != 1:
            raise OrtflowError(f"the gradient is {list(gradient.shape)}")
        out, dscores, kind = call.output(0, ()), call.output(1, scores.shape), call.types[1]
        losses = call.scratch(8 * max(rows, 1))
        numbers = _kept(classes, scores.type)
        if numbers is None or scores.pointer // BYTES[scores.type] % 8 != dscores // BYTES[kind] % 8:
            lse = losses + 4 * rows
            self._forward(call, labels, scores, lse, losses)
            self._backward(call, labels, gradient, scores, lse, dscores, kind)
        elif rows:
            group, block = _threads(classes)
            text = source("cross_entropy_both", (("X", scores.type), ("D", kind)), numbers)
            call.launch(
                text, "cross_entropy_both", blocks(rows, block // group), block,
                *map(c_void_p, (labels.pointer, gradient.pointer, scores.pointer, losses, dscores)),
                self._ignore, c_int64(rows), c_int(classes),
            )  # fmt: skip
        _total(call, losses, out, rows)


def _total(call: Call, losses: int, out: int, rows: int) -> None:
    text = source("cross_entropy", (("X", int(TensorProto.FLOAT)),), (("GROUP", _WARP), ("BLOCK", _BLOCK)))
    call.launch(text, "total", 1, 1024, c_void_p(losses), c_void_p(out), c_int64(rows))


def _kept(classes: int, kind: int) -> tuple[tuple[str, int], ...] | None:
    """The numbers of a pass that keeps a row of scores; None if it does not fit into registers and shared memory."""
    if kind not in BYTES:
        return None
    group, block = _threads(classes)
    words = 2 * BYTES[kind]
    chunks, registers = max(1, -(-(classes // 8) // group)), _REGISTERS // words
    if max(chunks - registers, 0) * 4 * words * block > _SHARED:
        return None
    return ("GROUP", group), ("BLOCK", block), ("KEPT", chunks), ("IN_REGISTERS", min(chunks, registers))


def _sizes(labels: Tensor, scores: Tensor) -> tuple[int, int]:
    rows, classes = rows_and_width(scores)
    if len(scores.shape) != 2 or size_of(labels) != rows:
        raise OrtflowError(f"labels are {list(labels.shape)}, and scores {list(scores.shape)}")
    if classes >= 2**31 - 8:
        raise OrtflowError(f"{classes:,} classes are more than a kernel takes")
    return rows, classes


def _threads(classes: int) -> tuple[int, int]:
    """Threads per row, and per block."""
    if classes <= 1024:
        return _WARP, _BLOCK
    group = 128 if classes <= 8192 else 512
    return group, group
