"""Layer and RMS normalisation over the last axis, and their gradients; see norm.cu.

LayerNormalization (x, scale, bias?) -> y, mean, 1 / deviation; LayerNormalizationGrad (dy, x, scale, mean,
1 / deviation, residual?) -> dx, dscale, dbias, sums?; RMSNormalization and its gradient are the same without bias and
mean. A residual, of the shape of x, is added to dx. The sums, if the attribute `sums` is 1, are those of dx over all
axes but the last. x, y, dy, dx and residual may be half.
"""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import c_float, c_int64, c_void_p
from typing import Any

from onnx import TensorProto

from ortflow.workflow.cuda.call import Call, Tensor
from ortflow.workflow.cuda.registry import operator
from ortflow.workflow.cuda.source import Rows, blocks, rows_and_width, rows_of, source, vector
from ortflow.workflow.cuda.sums import finish
from ortflow.workflow.errors import OrtflowError

_EPSILON = 1e-5
SUMMING = 264
"""Blocks that sum the gradients of scale and bias: the same number on every GPU, so that the sums are bit-identical."""
_ROWS_A_BLOCK = 64
_KEPT, _WIDEST = 24, 512
"""With up to five values per element, more would not fit into the registers of two blocks, or of wider ones."""
_COLUMNS = 256
_FLOAT = int(TensorProto.FLOAT)


class _Forward:
    rms: bool

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        self._epsilon = float(attributes.get("epsilon", _EPSILON))

    def run(self, call: Call) -> None:
        """Outputs besides y are fp32 [..., 1]."""
        x, scale = call.given(0), call.given(1)
        bias = call.inputs[2] if len(call.inputs) > 2 else None
        rows, width = rows_and_width(x)
        _check(width, scale, bias)
        y, column = call.output(0, x.shape), (*x.shape[:-1], 1)
        mean = 0 if self.rms else call.output(1, column)
        inverse = call.output(1 if self.rms else 2, column)
        if not rows * width:
            return
        vectors = [(scale.pointer, _FLOAT), *([(bias.pointer, _FLOAT)] if bias else [])]
        layout = rows_of(width, vector(width, [(x.pointer, x.type), (y, call.types[0]), *vectors]))
        text = _source("norm", layout, width, self.rms, X=x.type, Y=call.types[0])
        call.launch(
            text, "normalise", blocks(rows, layout.at_a_time), layout.block,
            *map(c_void_p, (x.pointer, scale.pointer, bias.pointer if bias else 0, y, mean, inverse)),
            c_float(self._epsilon), c_int64(rows),
        )  # fmt: skip


class _Backward:
    rms: bool

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        self._sums = bool(attributes.get("sums", 0))

    def run(self, call: Call) -> None:
        """Outputs besides dx are fp32 [width]."""
        dy, x, scale = (call.given(place) for place in range(3))
        mean, inverse = 0 if self.rms else call.given(3).pointer, call.given(3 if self.rms else 4).pointer
        last = 4 if self.rms else 5
        residual = call.inputs[last] if len(call.inputs) > last else None
        rows, width = rows_and_width(x)
        _check(width, scale, None)
        if dy.shape != x.shape:
            raise OrtflowError(f"the gradient is {list(dy.shape)}, and what was normalised {list(x.shape)}")
        if residual is not None and residual.shape != x.shape:
            raise OrtflowError(f"the residual is {list(residual.shape)}, and what was normalised {list(x.shape)}")
        dx, count = call.output(0, x.shape), (1 if self.rms else 2) + self._sums
        outs = [call.output(1 + place, (width,)) for place in range(count)]
        if not width:
            return
        kinds = [(dy.pointer, dy.type), (x.pointer, x.type), (dx, call.types[0]), (scale.pointer, _FLOAT)]
        kinds += [(residual.pointer, residual.type)] if residual else []
        layout = rows_of(width, vector(width, kinds), _KEPT, _WIDEST)
        types = {"G": dy.type, "X": x.type, "D": call.types[0], "R": residual.type if residual else _FLOAT}
        flags = (("RESIDUAL", int(residual is not None)), ("SUMS", int(self._sums)))
        text = _source("norm_gradient", layout, width, self.rms, flags, **types)
        summing = min(SUMMING, blocks(rows, layout.at_a_time if layout.reads else _ROWS_A_BLOCK))
        part = call.scratch(4 * count * width * max(summing, 1))
        past = residual.pointer if residual else 0
        pointers = dy.pointer, x.pointer, scale.pointer, mean, inverse, past, dx, part
        if rows:
            grid = summing if layout.reads else blocks(rows, 1)
            call.launch(text, "norm_gradient", grid, layout.block, *map(c_void_p, pointers), c_int64(rows))
        if rows and not layout.reads:
            grids = -(-width // _COLUMNS), summing
            read = dy.pointer, x.pointer, mean, inverse, dx, part
            call.launch(text, "norm_columns", grids, _COLUMNS, *map(c_void_p, read), c_int64(rows))
        finish(call, part, summing, width, *outs)


@operator(half_inputs=(0,), half_outputs=(0,))
class LayerNormalization(_Forward):
    """See the module's docstring."""

    rms = False


@operator(half_inputs=(0,), half_outputs=(0,))
class RMSNormalization(_Forward):
    """See the module's docstring."""

    rms = True


@operator(half_inputs=(0, 1, 5), half_outputs=(0,))
class LayerNormalizationGrad(_Backward):
    """See the module's docstring."""

    rms = False


@operator(half_inputs=(0, 1, 4), half_outputs=(0,))
class RMSNormalizationGrad(_Backward):
    """See the module's docstring."""

    rms = True


def _source(
    name: str, layout: Rows, width: int, rms: bool, flags: tuple[tuple[str, int], ...] = (), **types: int
) -> str:
    numbers = (*layout.numbers(width), ("RMS", int(rms)), *flags)
    return source(name, tuple(types.items()), numbers)


def _check(width: int, scale: Tensor, bias: Tensor | None) -> None:
    for vector_, name in ((scale, "scale"), (bias, "bias")):
        if vector_ is not None and vector_.shape != (width,):
            raise OrtflowError(f"the {name} is {list(vector_.shape)}, and rows have {width} elements")
