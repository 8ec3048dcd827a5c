"""Normalisation by the statistics of a batch, channels last: what each channel is multiplied with; see batch_norm.cu.

BatchStatistics (x [..., channels], scale, bias, running mean?, running variance?) -> slope, offset, mean, variance,
1 / deviation, correction [], new running mean?, new running variance?: y = slope x + offset, and the unbiased variance
is correction variance. A running statistic becomes `momentum` times itself and `fresh` times the batch's, with the bits
of the nodes that `running` finds. BatchGradients (dy, x, scale, mean,
1 / deviation) -> slope, factor, offset, dscale, dbias: dx = slope dy + factor x + offset. All other outputs are fp32
[channels]; x and dy may be half. Elementwise kernels compute y and dx, together with their neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import c_float, c_int64, c_void_p
from typing import Any

from ortflow.workflow.cuda.operators import Call, Tensor
from ortflow.workflow.cuda.source import columns_of, rows_and_width, source, vector
from ortflow.workflow.errors import OrtflowError

_EPSILON = 1e-5
_BLOCKS = 1056
"""Number of blocks to aim at if there are enough rows: the same on every GPU, so that the sums are bit-identical."""
_ROWS_A_THREAD = 4
_THREADS = 256
_COLUMNS_A_BLOCK, _FINISHING = 32, 1024
_LARGEST_GRID_Y = 65_535


def _sums(call: Call, x: Tensor, dy: Tensor | None, mean: int, rows: int, width: int) -> tuple[str, int, int]:
    """Launch the sums over chunks of rows: the source, the sums, and the number of chunks."""
    lanes = vector(width, [(x.pointer, x.type), *([(dy.pointer, dy.type)] if dy is not None else [])])
    columns = columns_of(width, lanes, 8)
    chunks = min(-(-_BLOCKS // columns.tiles), -(-rows // (columns.groups * _ROWS_A_THREAD)), _LARGEST_GRID_Y)
    part = call.scratch(4 * 2 * chunks * width)
    types = ("X", x.type), ("G", dy.type if dy is not None else x.type)
    text = source("batch_norm", types, (*columns.numbers(), ("GRADIENT", int(dy is not None))))
    pointers = x.pointer, dy.pointer if dy is not None else 0, mean, part
    grid = columns.tiles, chunks
    call.launch(text, "batch_sums", grid, _THREADS, *map(c_void_p, pointers), c_int64(rows), c_int64(width))
    return text, part, chunks


def _sizes(x: Tensor, vectors: Sequence[Tensor]) -> tuple[int, int]:
    rows, width = rows_and_width(x)
    if not rows * width or any(each.shape != (width,) for each in vectors):
        raise OrtflowError(f"a normalisation of {list(x.shape)} with {[list(each.shape) for each in vectors]}")
    return rows, width


class BatchStatistics:
    """See the module's docstring."""

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        self._epsilon = float(attributes.get("epsilon", _EPSILON))
        self._momentum, self._fresh = (float(attributes.get(name, 0)) for name in ("momentum", "fresh"))

    def run(self, call: Call) -> None:
        """See Operator."""
        x, scale, bias = (call.given(place) for place in range(3))
        old = [call.given(place) for place in range(3, len(call.inputs))]
        rows, width = _sizes(x, (scale, bias, *old))
        made = [*(call.output(place, (width,)) for place in range(5)), call.output(5, ())]
        running = [*(each.pointer for each in old), *(call.output(6 + place, (width,)) for place in range(len(old)))]
        text, part, chunks = _sums(call, x, None, 0, rows, width)
        pointers = part, x.pointer, scale.pointer, bias.pointer, *made, *(running or [0] * 4)
        call.launch(
            text, "batch_statistics", -(-width // _COLUMNS_A_BLOCK), _FINISHING, *map(c_void_p, pointers),
            *map(c_float, (self._epsilon, self._momentum, self._fresh)), c_int64(chunks), c_int64(rows), c_int64(width),
        )  # fmt: skip


class BatchGradients:
    """See the module's docstring."""

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        pass

    def run(self, call: Call) -> None:
        """See Operator."""
        dy, x, scale, mean, inverse = (call.given(place) for place in range(5))
        rows, width = _sizes(x, (scale, mean, inverse))
        if dy.shape != x.shape:
            raise OrtflowError(f"the gradient is {list(dy.shape)}, and what was normalised {list(x.shape)}")
        made = [call.output(place, (width,)) for place in range(5)]
        text, part, chunks = _sums(call, x, dy, mean.pointer, rows, width)
        pointers = part, scale.pointer, mean.pointer, inverse.pointer, *made
        call.launch(
            text, "batch_gradients", -(-width // _COLUMNS_A_BLOCK), _FINISHING, *map(c_void_p, pointers),
            c_int64(chunks), c_int64(rows), c_int64(width),
        )  # fmt: skip
