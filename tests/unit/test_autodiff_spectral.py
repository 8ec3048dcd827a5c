"""Gradients of discrete Fourier transforms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gradients import check, differences_of, gradients_of, model_of
from onnx.reference.op_run import OpRun

from ortflow.workflow.graph.autodiff.expand import make_differentiable

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


class STFT(OpRun):
    """By numpy, in double precision."""

    def _run(self, x: Any, step: Any, window: Any = None, length: Any = None, onesided: Any = 1) -> Any:
        values = x[..., 0] if x.ndim == 2 or x.shape[-1] == 1 else x[..., 0] + 1j * x[..., 1]
        values = x if x.ndim == 2 else values
        count, step = int(len(window) if length is None else length), int(step)
        rows = [values[:, at : at + count] for at in range(0, values.shape[1] - count + 1, step)]
        found = np.fft.fft(np.stack(rows, 1) * (1 if window is None else window), count, 2)
        found = found[..., : count // 2 + 1] if onesided else found
        return (np.stack([found.real, found.imag], -1),)


@pytest.mark.parametrize("seed", range(8))
def test_transform_of_frames(seed: int) -> None:
    random = np.random.default_rng(seed)
    length, step, parts = int(random.integers(1, 7)), int(random.integers(1, 5)), 1 + seed % 2
    x = random.normal(size=(2, length + int(random.integers(0, 8)), parts))
    window, count = (random.normal(size=length), np.asarray(length)) if seed % 3 else (None, np.asarray(length))
    inputs = {"x": x, "step": np.asarray(step), "window": window, "count": count if seed % 3 != 1 else None}
    wanted = ["x"] if window is None else ["x", "window"]
    check_decomposed("STFT", inputs, wanted, [STFT], onesided=0 if parts == 2 else int(random.integers(0, 2)))


def check_decomposed(operator: str, inputs: Any, wanted: list[str], new_ops: Any, **attributes: Any) -> None:
    """Asserts that the gradients of what replaces an operator equal differences of the operator."""
    precise = model_of(operator, inputs, wanted, real="float64", **attributes)
    expected = differences_of(precise, inputs, wanted, new_ops)
    for unknown in (False, True):
        model = model_of(operator, inputs, wanted, unknown=unknown, **attributes)
        if unknown:
            # The last axis tells complex numbers from real ones.
            model.graph.input[0].type.tensor_type.shape.dim[-1].dim_value = inputs["x"].shape[-1]
        ready, _ = make_differentiable(model, wanted, "loss")
        found = gradients_of(ready, inputs, wanted)
        for name in wanted:
            scale = max(1.0, float(np.abs(expected[name]).max()))
            np.testing.assert_allclose(found[name], expected[name], rtol=2e-4, atol=2e-5 * scale, err_msg=name)
