"""Images of few channels as convolutions of halves read them: channels last, padded; see channels.cu.

ChannelsLast (x [samples, channels, height, width]) -> y [samples, height, width, PADDED], zeros behind the channels.
cuDNN pads other numbers of channels in each convolution and each gradient, slower.
"""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import c_int, c_int64, c_void_p
from typing import Any

from ortflow.workflow.cuda.operators import Call
from ortflow.workflow.cuda.source import blocks, source
from ortflow.workflow.cuda.windows import AXES
from ortflow.workflow.errors import OrtflowError

PADDED = 8
"""Channels of the result, 16 bytes of halves."""
_BLOCK = 256


class ChannelsLast:
    """See the module's docstring."""

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        pass

    def run(self, call: Call) -> None:
        """See Operator."""
        x = call.given(0)
        if len(x.shape) != AXES + 2 or not 0 < x.shape[1] <= PADDED:
            raise OrtflowError(f"an image of few channels of {list(x.shape)}")
        samples, channels, height, width = x.shape
        y = call.output(0, (samples, height, width, PADDED))
        pixels = height * width
        if count := samples * pixels:
            text = source("channels", (("X", x.type), ("Y", call.types[0])), (("PADDED", PADDED),))
            call.launch(
                text, "channels_last", blocks(count, _BLOCK), _BLOCK, c_void_p(x.pointer), c_void_p(y),
                c_int64(count), c_int64(pixels), c_int(channels),
            )  # fmt: skip
