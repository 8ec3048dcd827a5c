"""Buffers on a real GPU, graphs bound to them, and running out of memory."""

from __future__ import annotations

import threading

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from ortflow.workflow.device.cuda import CudaDevice
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.optimize.on_cuda import on_cuda
from ortflow.workflow.sessions.binding import Binding
from ortflow.workflow.sessions.session import Sessions

COUNT = 100_003


def test_a_buffer_holds_what_was_written_and_slices_are_the_same_memory(device: CudaDevice) -> None:
    values = np.random.default_rng(0).random(COUNT, np.float32)
    first, second = device.allocate(COUNT, np.float32), device.allocate(COUNT, np.float32)
    assert not first.read().any()
    first.write(values)
    second.copy_from(first)
    second.add(first)
    second.slice(10, 20).fill(0)
    second.slice(20, 30).fill(2.5)
    expected = values + values
    expected[10:20], expected[20:30] = 0, 2.5
    np.testing.assert_array_equal(second.read(), expected)
    seen: list[np.ndarray] = []
    reader = threading.Thread(target=lambda: seen.append(second.slice(5, COUNT).read()))
    reader.start()
    reader.join()
    np.testing.assert_array_equal(seen[0], expected[5:])


def test_more_memory_than_there_is_names_the_setting(device: CudaDevice) -> None:
    with pytest.raises(UserError, match=r"data\.micro_batch: the memory of NVIDIA .* is full"):
        device.allocate(1 << 40, np.float32)


def table_gradient() -> onnx.ModelProto:
    """Many rows added to few: without care, the sum depends on the order in which threads arrive."""
    nodes = [
        helper.make_node("ConstantOfShape", ["shape"], ["zeros"]),
        helper.make_node("ScatterElements", ["zeros", "places", "rows"], ["sum"], axis=0, reduction="add"),
    ]
    graph = helper.make_graph(
        nodes,
        "table",
        [
            helper.make_tensor_value_info("places", TensorProto.INT64, [20_000, 64]),
            helper.make_tensor_value_info("rows", TensorProto.FLOAT, [20_000, 64]),
        ],
        [helper.make_tensor_value_info("sum", TensorProto.FLOAT, [16, 64])],
        [onnx.numpy_helper.from_array(np.array([16, 64]), "shape")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def test_sums_that_race_come_out_the_same_each_time(device: CudaDevice) -> None:
    random = np.random.default_rng(0)
    places = np.broadcast_to(random.integers(0, 16, (20_000, 1)), (20_000, 64)).copy()
    rows = random.normal(size=(20_000, 64)).astype(np.float32) * np.float32(10.0) ** random.integers(-6, 3, (20_000, 1))
    rows = rows.astype(np.float32)
    exact = np.zeros((16, 64))
    np.add.at(exact, (places, np.arange(64)), rows.astype(np.float64))
    binding = Binding(Sessions(device, 1, "error").open(on_cuda(table_gradient()).SerializeToString()), device)
    sums = []
    for _ in range(20):
        binding.feed("places", places)
        binding.feed("rows", rows)
        sums += binding.fetch(["sum"])
    assert all(np.array_equal(sums[0], each) for each in sums)
    np.testing.assert_allclose(sums[0], exact, rtol=1e-6, atol=1e-3)
    binding.feed("rows", np.where(rows == rows[7, 7], np.nan, rows))
    assert np.isnan(binding.fetch(["sum"])[0]).all(), "a sum with NaN must be NaN"
