"""Gradients of pooling."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gradients import check, check_against, gradients_of, model_of

from ortflow.workflow.onnx_runtime import onnxruntime

WINDOWS: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((2, 3, 8), {"kernel_shape": [3]}),
    ((1, 2, 9), {"kernel_shape": [2], "strides": [3], "pads": [1, 0]}),
    ((2, 3, 6, 4), {"kernel_shape": [2, 2], "strides": [2, 2]}),
    ((1, 2, 7, 5), {"kernel_shape": [2, 2], "strides": [2, 2]}),
    ((1, 2, 7, 6), {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 1, 1]}),
    ((1, 2, 7, 6), {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    ((1, 2, 8, 6), {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1}),
    ((1, 2, 7, 6), {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1], "ceil_mode": 1}),
    ((1, 2, 7, 6), {"kernel_shape": [3, 4], "strides": [2, 3], "auto_pad": "SAME_UPPER"}),
    ((1, 2, 7, 6), {"kernel_shape": [2, 2], "auto_pad": "SAME_LOWER"}),
    ((1, 2, 4, 5, 6), {"kernel_shape": [2, 3, 2], "strides": [1, 2, 2], "pads": [1, 0, 0, 0, 1, 1]}),
]
DILATED: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((1, 2, 9), {"kernel_shape": [3], "dilations": [2]}),
    ((1, 2, 9, 8), {"kernel_shape": [2, 3], "dilations": [3, 2], "strides": [2, 2], "pads": [0, 1, 1, 1]}),
]


def image(*shape: int) -> np.ndarray:
    """Numbers that are all different and not near 0, of both signs."""
    random = np.random.default_rng(0)
    count = int(np.prod(shape))
    return ((random.permutation(count) + 0.5 - count // 2) / 8).reshape(shape)


@pytest.mark.parametrize(("shape", "attributes"), [*WINDOWS, *DILATED], ids=str)
def test_max_pool(shape: tuple[int, ...], attributes: dict[str, Any]) -> None:
    check("MaxPool", {"x": image(*shape)}, ["x"], **attributes)


@pytest.mark.parametrize("storage_order", [0, 1])
def test_the_first_maximum_has_the_gradient(storage_order: int) -> None:
    inputs = {"x": np.array([[[[1.0, 2, 2], [2, 2, 1]]]])}
    model = model_of("MaxPool", inputs, ["x"], kernel_shape=[2, 2], storage_order=storage_order)
    np.testing.assert_allclose(gradients_of(model, inputs, ["x"])["x"], [[[[0, 5, 0], [0, 0, 0]]]])
    model = model_of("GlobalMaxPool", inputs, ["x"])
    np.testing.assert_allclose(gradients_of(model, inputs, ["x"])["x"], [[[[0, 2.5, 0], [0, 0, 0]]]])


@pytest.mark.parametrize("include", [0, 1])
@pytest.mark.parametrize(("shape", "attributes"), WINDOWS, ids=str)
def test_average_pool(shape: tuple[int, ...], attributes: dict[str, Any], include: int) -> None:
    if include and attributes.get("ceil_mode"):
        # Versions of ONNX Runtime count differently then.
        _check_by_runtime("AveragePool", image(*shape), count_include_pad=include, **attributes)
    else:
        check("AveragePool", {"x": image(*shape)}, ["x"], count_include_pad=include, **attributes)


def _check_by_runtime(operator: str, x: np.ndarray, **attributes: Any) -> None:
    """Central differences by ONNX Runtime: that of a square is exact, whatever the step."""
    model = model_of(operator, {"x": x}, ["x"], **attributes)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    expected = np.zeros(x.shape)
    for place in np.ndindex(x.shape):
        steps = np.zeros(x.shape)
        steps[place] = 1
        above, below = (session.run(["loss"], {"x": (x + n * steps).astype(np.float32)})[0] for n in (1, -1))
        expected[place] = (above - below) / 2
    np.testing.assert_allclose(gradients_of(model, {"x": x}, ["x"])["x"], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize(("shape", "attributes"), [*WINDOWS, *DILATED], ids=str)
def test_norm_pool(shape: tuple[int, ...], attributes: dict[str, Any], p: int) -> None:
    check("LpPool", {"x": image(*shape)}, ["x"], p=p, **attributes)


@pytest.mark.parametrize("operator", ["GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool"])
@pytest.mark.parametrize("shape", [(2, 3, 5), (2, 3, 2, 4), (1, 2, 2, 3, 2)], ids=str)
def test_global_pool(operator: str, shape: tuple[int, ...]) -> None:
    check(operator, {"x": image(*shape)}, ["x"])


@pytest.mark.parametrize("seed", range(6))
def test_max_unpool(seed: int) -> None:
    """Random sizes and strides, and places in the flat output in any order."""
    random = np.random.default_rng(seed)
    axes = 1 + seed % 3
    shape = (*random.integers(1, 3, 2), *random.integers(1, 4, axes))
    kernel, strides = random.integers(1, 4, axes), random.integers(1, 3, axes)
    large = (*shape[:2], *((np.array(shape[2:]) - 1) * strides + kernel))
    size = int(np.prod(shape))
    places = random.permutation(int(np.prod(large)))[:size].reshape(shape) if np.prod(large) >= size else None
    if places is None:
        pytest.skip("the output is smaller than the input")
    x = random.normal(size=shape)
    y = np.zeros(int(np.prod(large)))
    y[places] = x
    # The loss is the sum of (y^2 + y) / 2.
    expected = {"x": ((2 * y + 1) * 0.5)[places]}
    options = {"kernel_shape": kernel.tolist(), "strides": strides.tolist()}
    check_against(expected, "MaxUnpool", {"x": x, "i": places}, ["x"], **options)
