"""Fused kernels give the same bits as ONNX Runtime's own CUDA kernels one after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ortflow.workflow.device.cuda import CudaDevice
from ortflow.workflow.fusion.groups import fuse
from ortflow.workflow.fusion.source import BOOLS, CONDITIONS, FLOATS
from ortflow.workflow.graph.domains import CUDA_DOMAIN
from ortflow.workflow.graph.ir import shapes
from ortflow.workflow.sessions.binding import Binding
from ortflow.workflow.sessions.session import Sessions

WHOLE = (6, 5, 4, 33)
SHAPES = [
    WHOLE, (), (1,), (33,), (4, 1), (5, 1, 1), (6, 1, 1, 1), (5, 4, 1), (6, 5, 1, 1), (4, 33), (6, 1, 4, 1),
    (6, 1, 1, 33), (1, 5, 1, 33), (5, 4, 33),
]  # fmt: skip


def model_of(nodes: Sequence[onnx.NodeProto], inputs: dict[str, np.ndarray], outputs: Sequence[str]) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, array.shape) for name, array in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(np.float32(value), name) for name, value in (("zero", 0), ("half", 0.5))],
    )
    imports = [helper.make_opsetid("", 18), helper.make_opsetid(CUDA_DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=9)
    shapes.infer(model, [])
    return model


def both(device: CudaDevice, model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[list[np.ndarray]]:
    """The outputs of the graph, fused and not fused."""
    fused, taken = fuse(model)
    assert taken
    sessions = Sessions(device, 1, "error")
    made = []
    for each in (fused, model):
        binding = Binding(sessions.open(each.SerializeToString(), as_written=True), device)
        for name, array in feeds.items():
            binding.feed(name, array)
        made.append(binding.fetch([value.name for value in model.graph.output]))
    return made


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_broadcast(device: CudaDevice, shape: tuple[int, ...]) -> None:
    random = np.random.default_rng(0)
    feeds = {
        "x": random.normal(size=WHOLE).astype(np.float32),
        "y": random.normal(size=shape).astype(np.float32),
    }
    nodes = [
        helper.make_node("Exp", ["y"], ["e"]),
        helper.make_node("Mul", ["e", "half"], ["small"]),
        helper.make_node("Mul", ["x", "small"], ["p"]),
        helper.make_node("Sub", ["p", "x"], ["z"]),
    ]
    for mine, theirs in zip(*both(device, model_of(nodes, feeds, ["small", "p", "z"]), feeds), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("operator", [*FLOATS, *BOOLS])
def test_every_operator(device: CudaDevice, operator: str) -> None:
    random = np.random.default_rng(1)
    # As large as activations are, with zeros, ties and NaN.
    x, y = (random.normal(0, 3, (1000, 257)).astype(np.float32) for _ in range(2))
    x[0, :4], y[0, :4] = [0, -0.0, np.inf, np.nan], [0, 1, 2, 3]
    y[1] = x[1]
    feeds = {"x": x, "y": y}
    conditions = CONDITIONS.get(operator, ())
    count = {"Where": 3}.get(operator, 2 if "{1}" in {**FLOATS, **BOOLS}[operator] else 1)
    nodes = [
        helper.make_node("Add", ["x", "zero"], ["a"]),
        helper.make_node("Greater", ["x", "y"], ["g"]),
        helper.make_node("Less", ["x", "zero"], ["l"]),
    ]
    floats, bools = iter(("a", "y")), iter(("g", "l"))
    read = [next(bools) if place in conditions else next(floats) for place in range(count)]
    attributes = {"to": TensorProto.FLOAT} if operator == "Cast" else {}
    nodes.append(helper.make_node(operator, read, ["r"], **attributes))
    if operator in BOOLS:
        nodes.append(helper.make_node("Cast", ["r"], ["f"], to=TensorProto.FLOAT))
    nodes.append(helper.make_node("Mul", ["f" if operator in BOOLS else "r", "half"], ["z"]))
    needed = {name for one in nodes for name in one.input}
    nodes = [one for one in nodes if one.output[0] in needed or one.output[0] == "z"]
    feeds = {name: array for name, array in feeds.items() if any(name in one.input for one in nodes)}
    for mine, theirs in zip(*both(device, model_of(nodes, feeds, ["z"]), feeds), strict=True):
        # ONNX Runtime's Relu makes 0 of a NaN; ours keeps it, so that the step is skipped.
        expected = np.where(np.isnan(x), x, theirs) if operator == "Relu" else theirs
        np.testing.assert_array_equal(mine, expected)


@pytest.mark.parametrize("kind", [TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16])
@pytest.mark.parametrize("shape", [(4, 512, 3072), (3, 7, 33), (2000, 1), (1, 8), (70, 1000), (9, 2304)], ids=str)
def test_results_that_are_also_summed_over_their_rows(device: CudaDevice, shape: tuple[int, ...], kind: int) -> None:
    """Gelu's gradient behind a bias, summed inside its kernel and by a kernel of its own."""
    random, width = np.random.default_rng(0), shape[-1]
    feeds = {
        "x": random.normal(size=shape).astype(np.float32),
        "dy": random.normal(size=shape).astype(np.float32),
        "bias": random.normal(size=width).astype(np.float32),
    }
    nodes = [
        helper.make_node("Add", ["x", "bias"], ["h"]),
        helper.make_node("Erf", ["h"], ["e"]),
        helper.make_node("Mul", ["e", "half"], ["p"]),
        helper.make_node("Add", ["p", "half"], ["phi"]),
        helper.make_node("Mul", ["phi", "dy"], ["g"]),
        helper.make_node("Cast", ["g"], ["y"], to=kind) if kind != 1 else helper.make_node("Neg", ["g"], ["y"]),
        helper.make_node("ColumnSums", ["y"], ["sums"], domain=CUDA_DOMAIN, axes=len(shape) - 1),
        helper.make_node("Cast", ["y"], ["single"], to=TensorProto.FLOAT),
        helper.make_node("Abs", ["sums"], ["out"]),
    ]
    model = model_of(nodes, feeds, ["single", "out"])
    model.graph.value_info.append(helper.make_tensor_value_info("sums", TensorProto.FLOAT, [width]))
    fused, _ = fuse(model)
    assert [one.op_type for one in fused.graph.node].count("FusedSums") == 1
    binding = Binding(Sessions(device, 1, "error").open(fused.SerializeToString(), as_written=True), device)
    for name, array in feeds.items():
        binding.feed(name, array)
    y, sums = binding.fetch(["single", "out"])
    h = feeds["x"].astype(np.float64) + feeds["bias"]
    exact = (0.5 + 0.5 * np.vectorize(math.erf)(h)) * feeds["dy"] * (-1 if kind == 1 else 1)
    rounding = {TensorProto.FLOAT: 2e-6, TensorProto.FLOAT16: 2.0**-10, TensorProto.BFLOAT16: 2.0**-7}[kind]
    np.testing.assert_allclose(y, exact, rtol=rounding, atol=1e-6)
    rows = exact.reshape(-1, width)
    np.testing.assert_allclose(sums, np.abs(rows.sum(0)), rtol=0, atol=2e-5 * np.abs(rows).sum(0).max())
    again = binding.fetch(["single", "out"])
    np.testing.assert_array_equal(sums, again[1])


def test_more_elements_than_32_bits_count(device: CudaDevice) -> None:
    if device.gpu.free < 70 << 30:
        pytest.skip("needs a GPU with 70 GiB free")
    rows, width = (1 << 16) + 3, 1 << 16
    nodes = [
        helper.make_node("Mul", ["x", "half"], ["m"]),
        helper.make_node("Add", ["m", "y"], ["z"]),
    ]
    shape = {"x": np.broadcast_to(np.float32(0), (rows, width)), "y": np.zeros(width, np.float32)}
    fused, _ = fuse(model_of(nodes, shape, ["z"]))
    binding = Binding(Sessions(device, 1, "error").open(fused.SerializeToString()), device)
    x, z = device.allocate(rows * width, np.float32), device.allocate(rows * width, np.float32)
    last = x.slice((rows - 1) * width, rows * width)
    last.write(np.arange(width, dtype=np.float32))
    binding.read_from("x", x, (rows, width))
    binding.feed("y", np.arange(width, dtype=np.float32))
    binding.write_to("z", z, (rows, width))
    binding.run()
    np.testing.assert_array_equal(z.slice((rows - 1) * width, rows * width).read(), np.arange(width) * np.float32(1.5))
    np.testing.assert_array_equal(z.slice(width, 2 * width).read(), np.arange(width, dtype=np.float32))
