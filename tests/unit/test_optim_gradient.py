"""Averaging and clipping of the flat gradient buffer, and the precision of its norm."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from kernels import LIBRARY, needs_kernels

from ortflow.workflow.kernels.graph import with_kernels
from ortflow.workflow.onnx_runtime import onnxruntime as ort
from ortflow.workflow.optim.gradient import gradient_graph

Array = npt.NDArray[Any]
KERNELS = [False, pytest.param(True, marks=needs_kernels)]
pytestmark = pytest.mark.parametrize("kernels", KERNELS, ids=["composed", "kernel"])


def scaled_in_place(
    gradients: Array, inverse_weight: float, max_norm: float, *, kernels: bool, threads: int = 2
) -> float:
    """Run the graph as the trainer does; returns the norm."""
    model = gradient_graph()
    onnx.checker.check_model(model)
    options = ort.SessionOptions()
    if kernels:
        model = with_kernels(model)
        assert [node.op_type for node in model.graph.node] == ["ScaleGradients"]
        options.register_custom_ops_library(str(LIBRARY.path))
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    norm = np.zeros(1, np.float32)
    place = ("cpu", 0, np.float32, gradients.shape, gradients.ctypes.data)
    binding.bind_input("gradients", *place)
    binding.bind_output("gradients.out", *place)
    binding.bind_output("norm", "cpu", 0, np.float32, (1,), norm.ctypes.data)
    binding.bind_cpu_input("inverse_weight", np.full(1, inverse_weight, np.float32))
    binding.bind_cpu_input("max_norm", np.full(1, max_norm, np.float32))
    session.run_with_iobinding(binding)
    return float(norm[0])


@pytest.mark.rotates
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("count", [64, 64 * 1003, 64 * 40009])
@pytest.mark.parametrize("max_norm", [np.inf, 1e9, 0.5])
def test_mean_norm_and_clip(count: int, max_norm: float, threads: int, kernels: bool) -> None:
    values = np.random.default_rng(count).normal(size=count).astype(np.float32)
    mean = values.astype(np.float64) / 128
    expected = np.linalg.norm(mean)
    gradients = values.copy()
    found = scaled_in_place(gradients, 1 / 128, max_norm, kernels=kernels, threads=threads)
    assert found == pytest.approx(expected, rel=1e-6)
    np.testing.assert_allclose(gradients, mean * min(1.0, max_norm / (expected + 1e-6)), rtol=1e-6)
    again = values.copy()
    scaled_in_place(again, 1 / 128, max_norm, kernels=kernels, threads=threads)
    np.testing.assert_array_equal(again, gradients)


def test_a_long_norm_keeps_its_digits(kernels: bool) -> None:
    gradients = np.full(64 * 300_000, 0.1, np.float32)
    expected = float(np.float32(0.1)) * np.sqrt(gradients.size)
    assert scaled_in_place(gradients, 1.0, np.inf, kernels=kernels) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("max_norm", [np.inf, 1.0])
@pytest.mark.parametrize("place", [0, 63, 64 * 501 - 1])
def test_nan_shows_in_the_norm(bad: float, max_norm: float, place: int, kernels: bool) -> None:
    gradients = np.ones(64 * 501, np.float32)
    gradients[place] = bad
    assert not np.isfinite(scaled_in_place(gradients, 0.5, max_norm, kernels=kernels))


def test_no_gradient_at_all_stays_zero(kernels: bool) -> None:
    gradients = np.zeros(128, np.float32)
    assert scaled_in_place(gradients, 1.0, 1.0, kernels=kernels) == 0.0
    np.testing.assert_array_equal(gradients, 0)
