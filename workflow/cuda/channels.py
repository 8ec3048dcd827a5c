"""Images of few channels as convolutions of halves read them: channels last, padded; see channels.cu.

ChannelsLast (x [samples, channels, height, width]) -> y [samples, rows, columns, stored]: the pixels in blocks of
`block` height and width (1 and 1 without that attribute), `before` pixels of zeros in front, and `sizes` blocks along
each axis (as many as pixels without). A block's channels are [channels, height, width], and zeros behind them to a
multiple of PADDED. See `blocks`. cuDNN pads other numbers of channels in each convolution and each gradient, slower.
"""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import c_int, c_int64, c_void_p
from typing import Any

from ortflow.workflow.cuda.blocks import PADDED, stored
from ortflow.workflow.cuda.call import Call
from ortflow.workflow.cuda.registry import operator
from ortflow.workflow.cuda.source import blocks, source
from ortflow.workflow.cuda.windows import AXES
from ortflow.workflow.errors import OrtflowError

_BLOCK = 256
_LARGEST = 1 << 31


@operator(half_outputs=(0,), half_only=True)
class ChannelsLast:
    """See the module's docstring."""

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        self._block = tuple(attributes.get("block", (1, 1)))
        self._before = tuple(attributes.get("before", (0, 0)))
        self._sizes = tuple(attributes.get("sizes", ()))

    def run(self, call: Call) -> None:
        """See Operator."""
        x = call.given(0)
        if len(x.shape) != AXES + 2 or not 0 < x.shape[1] <= PADDED:
            raise OrtflowError(f"an image of few channels of {list(x.shape)}")
        samples, channels, height, width = x.shape
        rows, columns = self._sizes or (height, width)
        depth = stored(channels, self._block)
        y = call.output(0, (samples, rows, columns, depth))
        count = samples * rows * columns * depth // PADDED
        if max(channels * height * width, rows * columns * depth) >= _LARGEST:
            raise OrtflowError(f"an image of few channels of {list(x.shape)}: a sample is too large")
        if count:
            high, wide = self._block
            numbers = ("PADDED", PADDED), ("STORED", depth), ("CHANNELS", channels), ("HIGH", high), ("WIDE", wide)
            text = source("channels", (("X", x.type), ("Y", call.types[0])), numbers)
            call.launch(
                text, "channels_last", blocks(count, _BLOCK), _BLOCK, c_void_p(x.pointer), c_void_p(y), c_int64(count),
                *map(c_int, (height, width, rows, columns, *self._before)),
            )  # fmt: skip
