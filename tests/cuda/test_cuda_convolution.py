"""Convolutions by cuDNN and both gradients against float64: layouts, element types, windows; the same bits twice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuda_convolutions import CASES, CASES_OF_FEW, GROUPED, ODD, Array, Case, reference
from operators_on_gpu import BF16, FLOAT, FP16, NAMES, check, stored, twice
from test_cuda_operators import OnGpu

from ortflow.workflow.cuda.blocks import Blocks
from ortflow.workflow.cuda.cudnn import available
from ortflow.workflow.device.cuda import CudaDevice

STEM = Case(samples=64, channels=3, outputs=64, sizes=(224, 224), kernel=(7, 7), strides=(2, 2), pads=(3,) * 4)
"""ResNet's first one."""
LAYOUTS = [(FLOAT, False), (FP16, True), (BF16, True)]


@pytest.fixture(scope="module")
def compute(device: CudaDevice) -> OnGpu:
    if (reason := available(device.gpu.capability)) is not None:
        pytest.skip(reason)
    return OnGpu(device)


def turned(array: Array, last: bool) -> Array:
    """From channels first."""
    return np.ascontiguousarray(array.transpose(0, 2, 3, 1)) if last else array


def compare(compute: OnGpu, case: Case, kind: int, last: bool) -> None:
    random = np.random.default_rng(sum(map(ord, str(case))))
    x, w, dy = (stored(random.normal(0, 1, dims), kind) for dims in case.shapes())
    y, dx, dw = reference(case, x[0], w[0], dy[0])
    y, dx = turned(y, last), turned(dx, last)
    x, w, dy = ((turned(each, last), kind) for each in (x[0], w[0], dy[0]))
    settings: dict[str, Any] = {**case.attributes, "channels_last": int(last)}
    # Sums in fp32: as many addends as a window, or as windows, has elements.
    of_window = 1e-6 * max(1.0, (w[0].size / case.outputs) ** 0.5)
    of_windows = 1e-6 * max(1.0, (dy[0].size / case.outputs) ** 0.5)
    said = f"{case} {NAMES[kind]} {'last' if last else 'first'}"
    (found,) = twice(compute, "Convolution", settings, [x, w], [kind])
    check(f"y {said}", found, y, kind, of_window)
    (found,) = twice(compute, "ConvolutionDataGrad", {**settings, "sizes": case.sizes}, [dy, w], [kind])
    check(f"dx {said}", found, dx, kind, of_window)
    (found,) = twice(compute, "ConvolutionWeightGrad", settings, [dy, x], [FLOAT])
    # cuDNN writes halves.
    check(f"dw {said}", found, dw, kind, of_windows)
    if last:
        fewer = -(-dw.shape[1] // 2)
        settings["weight"] = [fewer, *dw.shape[2:]]
        (part,) = twice(compute, "ConvolutionWeightGrad", settings, [dy, x], [FLOAT])
        np.testing.assert_array_equal(part, found[:, :fewer])


@pytest.mark.parametrize("kind", [BF16, FP16], ids=NAMES.get)
@pytest.mark.parametrize("case", [*CASES_OF_FEW, STEM], ids=str)
def test_convolutions_of_few_channels(compute: OnGpu, case: Case, kind: int) -> None:
    random = np.random.default_rng(sum(map(ord, str(case))))
    x, w, dy = (stored(random.normal(0, 1, dims), kind) for dims in case.shapes())
    y, _, dw = reference(case, x[0], w[0], dy[0])
    few = Blocks.of(case.channels, case.sizes, {**case.attributes, "channels_last": 1})
    assert few.block == case.strides
    given, weight = (
        (twice(compute, "ChannelsLast", attributes, [(value, FLOAT)], [kind])[0], kind)
        for value, attributes in ((x[0], few.of_image), (w[0], few.of_weight))
    )
    (found,) = twice(compute, "Convolution", few.windows, [given, weight], [kind])
    check(f"y {case}", found, turned(y, True), kind, 1e-6 * (w[0].size / case.outputs) ** 0.5)
    gradient = turned(dy[0], True), kind
    (found,) = twice(compute, "ConvolutionWeightGrad", {**few.windows, **few.of_gradient}, [gradient, given], [FLOAT])
    check(f"dw {case}", found, dw, kind, 1e-6 * (dy[0].size / case.outputs) ** 0.5)


@pytest.mark.parametrize(("kind", "last"), LAYOUTS, ids=lambda each: NAMES.get(each, "") if each > 1 else str(each))
@pytest.mark.parametrize("case", [*CASES, *ODD], ids=str)
def test_convolutions(compute: OnGpu, case: Case, kind: int, last: bool) -> None:
    compare(compute, case, kind, last)


@pytest.mark.parametrize(("kind", "last"), LAYOUTS, ids=lambda each: NAMES.get(each, "") if each > 1 else str(each))
@pytest.mark.parametrize("case", GROUPED, ids=str)
def test_grouped_convolutions(compute: OnGpu, case: Case, kind: int, last: bool) -> None:
    compare(compute, case, kind, last)
