"""Gradients of discrete Fourier transforms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gradients import check
from onnx.reference.op_run import OpRun

RANDOM = np.random.default_rng(9)


class DFT(OpRun):
    """By numpy, in double precision."""

    def _run(self, x: Any, length: Any = None, axis: Any = 1, inverse: Any = 0, onesided: Any = 0) -> Any:
        axis %= x.ndim
        values = x[..., 0] if x.shape[-1] == 1 else x[..., 0] + 1j * x[..., 1]
        count = int(length) if length is not None else x.shape[axis]
        found = (np.fft.ifft if inverse else np.fft.fft)(values, count, axis)
        if onesided:
            found = np.take(found, range(count // 2 + 1), axis)
        return (np.stack([found.real, found.imag], -1),)


@pytest.mark.parametrize("length", [None, 4, 7, 9], ids=["whole", "cut", "as it is", "padded"])
@pytest.mark.parametrize("inverse", [0, 1])
@pytest.mark.parametrize(("axis", "parts"), [(1, 1), (1, 2), (2, 2), (-2, 1)])
def test_transform(axis: int, parts: int, inverse: int, length: int | None) -> None:
    x = RANDOM.normal(size=(2, 7, 3, parts) if axis == 1 else (2, 3, 7, parts))
    given = {"x": x, "length": None if length is None else np.asarray(length)}
    check("DFT", given, ["x"], new_ops=[DFT], axis=axis, inverse=inverse)


@pytest.mark.parametrize("size", [1, 2, 7, 8])
@pytest.mark.parametrize("length", [None, 5, 9])
def test_one_side(size: int, length: int | None) -> None:
    given = {"x": RANDOM.normal(size=(3, size, 1)), "length": None if length is None else np.asarray(length)}
    check("DFT", given, ["x"], new_ops=[DFT], onesided=1)
