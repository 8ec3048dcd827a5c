"""The scaling of the gradient for a host that does not read the sums, and for shards: the same as for others."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
import pytest

from ortflow.workflow.graph.domains import CUDA_DOMAIN
from ortflow.workflow.onnx_runtime import onnxruntime
from ortflow.workflow.optim.gradient import (
    EPSILON,
    FACTOR,
    gradient_graph,
    queued_gradient_graph,
    square_sum_graph,
    square_sums_graph,
)

VALUES = np.random.default_rng(4).normal(size=192).astype(np.float32)


def run(model: onnx.ModelProto, **feeds: Any) -> dict[str, np.ndarray]:
    onnx.checker.check_model(model)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    values = dict(zip(names, session.run(names, feeds), strict=True))
    for output in session.get_outputs():
        described = [192 if isinstance(size, str) else size for size in output.shape]
        assert described == list(values[output.name].shape), output.name
    return values


def one(value: float, kind: type = np.float32) -> np.ndarray:
    return np.array([value], kind)


def queued(*, loss: float = 3.0, weight: float = 8.0, scale: float = 1.0, most: float = 0.5, values: Any = VALUES):
    inputs = {"loss": one(loss), "weight": one(weight), "loss_scale": one(scale), "max_norm": one(most)}
    shared = run(
        queued_gradient_graph(shared=True), **inputs, squares=one(np.square(values.astype(float)).sum(), np.float64)
    )
    whole = run(queued_gradient_graph(), **inputs, gradients=values)
    for name in ("norm", "useful"):
        np.testing.assert_allclose(shared[name], whole[name], rtol=1e-6)
    np.testing.assert_allclose(values * shared[FACTOR], whole["gradients.out"], rtol=1e-6)
    return whole


@pytest.mark.parametrize("most", [math.inf, 100.0, 0.5])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_the_result_is_that_of_a_host_that_reads_the_sums(most: float, scale: float) -> None:
    expected = run(gradient_graph(), gradients=VALUES, inverse_weight=one(1 / 8), max_norm=one(most))
    found = queued(most=most, scale=scale, values=VALUES * np.float32(scale))
    assert found["useful"] == [1.0]
    np.testing.assert_allclose(found["norm"], expected["norm"], rtol=1e-6)
    np.testing.assert_allclose(found["gradients.out"], expected["gradients.out"], rtol=1e-6)
    norm = float(np.linalg.norm(VALUES.astype(float))) / 8
    np.testing.assert_allclose(found["gradients.out"], VALUES / 8 * min(1.0, most / (norm + EPSILON)), rtol=1e-5)


@pytest.mark.parametrize(
    "change",
    [
        {"loss": math.nan}, {"loss": math.inf}, {"weight": 0.0},
        {"values": np.where(np.arange(192) == 7, np.float32(np.nan), VALUES)},
        {"values": np.where(np.arange(192) == 7, np.float32(np.inf), VALUES)},
    ],
)  # fmt: skip
def test_unusable_gradients_become_nan_throughout(change: dict[str, Any]) -> None:
    found = queued(**change)
    assert found["useful"] == [0.0]
    assert np.isnan(found["gradients.out"]).all()


def test_squares_of_a_shard_and_of_its_pieces_are_summed_in_double_precision() -> None:
    values = np.full(192, 1e-3, np.float32)
    values[0] = 3e4
    expected = np.square(values.astype(np.float64)).sum()
    (whole,) = run(square_sum_graph(), gradients=values).values()
    pieces = {f"piece.{number}": part for number, part in enumerate(np.split(values, [64, 128]))}
    (parts,) = run(square_sums_graph(3), **pieces).values()
    (single,) = run(square_sums_graph(1), **{"piece.0": values}).values()
    assert {array.dtype for array in (whole, parts, single)} == {np.dtype(np.float64)}
    np.testing.assert_allclose([whole[0], parts[0], single[0]], expected, rtol=1e-9)


@pytest.mark.parametrize("fused", [True, False])
def test_graphs_for_gpus_alone_name_the_domain_of_our_kernels(fused: bool) -> None:
    graphs = square_sum_graph(fused=fused), square_sums_graph(2, fused=fused), queued_gradient_graph(fused=fused)
    for model in graphs:
        domains = {opset.domain for opset in model.opset_import}
        assert (CUDA_DOMAIN in domains) == fused
        used = {node.domain for node in model.graph.node}
        assert used <= domains
        assert (CUDA_DOMAIN in used) == fused
