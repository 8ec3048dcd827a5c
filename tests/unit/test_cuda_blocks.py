"""Blocks of pixels as channels: convolutions of few channels; the kernels run on the CPU from the same source."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from cuda_convolutions import CASES_OF_FEW, Case, reference
from emulated_cuda import EmulatedCall, needs_emulation
from operators_on_gpu import BF16, FLOAT, FP16, check_channels_last, stored
from test_cuda_kernels import Emulated

from ortflow.workflow.cuda import source
from ortflow.workflow.cuda.blocks import Blocks
from ortflow.workflow.cuda.windows import Windows


def test_blocks_of_a_stride_begin_with_a_window() -> None:
    """The numbers of ResNet's first convolution, by hand."""
    attributes = {"kernel_shape": [7, 7], "strides": [2, 2], "dilations": [1, 1], "pads": [3, 3, 3, 3], "group": 1}
    few = Blocks.of(3, (224, 224), attributes)
    assert few.of_image == {"block": [2, 2], "before": [3, 3], "sizes": [115, 115]}
    assert few.of_weight == {"block": [2, 2], "sizes": [4, 4]}
    assert few.windows == {
        "kernel_shape": [4, 4], "strides": [1, 1], "dilations": [1, 1], "pads": [0, 0, 0, 0], "group": 1,
    }  # fmt: skip
    assert few.of_gradient == {"block": [2, 2], "weight": [3, 7, 7]}


@pytest.mark.parametrize("attributes", [
    {"kernel_shape": [3, 3]}, {"kernel_shape": [1, 1], "strides": [2, 2]},
    {"kernel_shape": [3, 3], "strides": [2, 2], "dilations": [2, 2]},
], ids=["no stride", "most pixels are skipped", "dilated"])  # fmt: skip
def test_blocks_that_gain_nothing_have_one_pixel(attributes: dict[str, Any]) -> None:
    few = Blocks.of(3, (12, 12), attributes)
    assert (few.block, few.of_image, few.of_weight, few.windows) == ((1, 1), {}, {}, attributes)


@needs_emulation
@pytest.mark.parametrize("case", [
    ((2, 3, 14, 15), (2, 2), (4, 4), (9, 9)), ((3, 3, 7, 7), (2, 2), (1, 1), (4, 4)),
    ((1, 1, 9, 8), (1, 3), (0, 2), (7, 4)), ((2, 3, 32, 32), (16, 16), (0, 0), (2, 2)),
    ((4, 7, 11, 5), (3, 2), (2, 0), (3, 2)), ((0, 3, 4, 4), (2, 2), (0, 0), (2, 2)),
], ids=str)  # fmt: skip
@pytest.mark.parametrize(("of_x", "of_y"), [(FLOAT, BF16), (FP16, FP16)], ids=str)
def test_blocks_of_pixels_become_channels(case: Any, of_x: int, of_y: int) -> None:
    dims, block, before, sizes = case
    check_channels_last(Emulated(), dims, of_x, of_y, block, before, sizes)


@needs_emulation
@pytest.mark.parametrize("case", CASES_OF_FEW, ids=str)
def test_blocks_convolve_as_the_pixels_do(case: Case) -> None:
    """The weight in blocks, multiplied with the image in blocks, and its gradient back in its own order."""
    random = np.random.default_rng(sum(map(ord, str(case))))
    x, w, dy = (stored(random.normal(0, 1, dims), BF16)[0] for dims in case.shapes())
    few = Blocks.of(case.channels, case.sizes, {**case.attributes, "channels_last": 1})
    assert few.block == case.strides
    changed = [
        Emulated()("ChannelsLast", attributes, [(value, FLOAT)], [BF16])[0].transpose(0, 3, 1, 2)
        for value, attributes in ((x, few.of_image), (w, few.of_weight))
    ]
    windows = Windows.of(few.windows)
    blocks = Case(case.samples, changed[0].shape[1], case.outputs, changed[0].shape[2:], windows.kernel, pads=(0,) * 4)
    found, _, gradient = reference(blocks, *changed, dy)
    y, _, dw = reference(case, x, w, dy)
    np.testing.assert_allclose(found, y, rtol=1e-9, atol=1e-9)
    rounded = stored(gradient.transpose(0, 2, 3, 1), BF16)[0]
    call = EmulatedCall([(np.ascontiguousarray(rounded), BF16)], [FLOAT])
    made = call.output(0, dw.shape)
    call.launch(
        source.source("convolution", (("X", BF16),)), "out_of_blocks", -(-dw.size // 256), 256,
        ctypes.c_void_p(call.given(0).pointer), ctypes.c_void_p(made), ctypes.c_int64(dw.size),
        *map(ctypes.c_int, (*windows.kernel, blocks.channels, *dw.shape[1:], *few.block)),
    )  # fmt: skip
    np.testing.assert_array_equal(call.results()[0], stored(dw, BF16)[0])
