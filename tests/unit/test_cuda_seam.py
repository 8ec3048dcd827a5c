"""The operators of `ortflow.cuda` as ONNX Runtime calls them: signatures, outputs, failures, and broadcasts."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from operators_on_cpu import needs_compilers, operators_here, session_of

from ortflow.workflow.cuda import table
from ortflow.workflow.cuda.operators import Call
from ortflow.workflow.errors import OrtflowError
from ortflow.workflow.fusion.groups import fuse
from ortflow.workflow.graph.ir import shapes
from ortflow.workflow.graph.ir.edit import attributes_of
from ortflow.workflow.graph.operators.fused import shape_of_sums

pytestmark = needs_compilers
WHOLE = (6, 5, 4, 32)
SHAPES = [
    WHOLE, (), (1,), (32,), (4, 1), (5, 1, 1), (6, 1, 1, 1), (5, 4, 1), (6, 5, 1, 1), (4, 32), (6, 1, 4, 1),
    (6, 1, 1, 32), (1, 5, 1, 32), (5, 4, 32), (6, 1, 4, 32), (6, 5, 1, 32),
]  # fmt: skip


def model_of(
    nodes: list[onnx.NodeProto], inputs: Mapping[str, np.ndarray], outputs: Mapping[str, int]
) -> onnx.ModelProto:
    kinds = {np.dtype(np.float32): TensorProto.FLOAT, np.dtype(np.float16): TensorProto.FLOAT16}
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info(name, kinds[array.dtype], array.shape) for name, array in inputs.items()],
        [helper.make_tensor_value_info(name, kind, None) for name, kind in outputs.items()],
        [numpy_helper.from_array(np.float32(0.5), "half")],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("ortflow.cuda", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


@pytest.mark.rotates
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("width", [32, 33])
@pytest.mark.parametrize("kind", [np.float32, np.float16])
def test_operands_of_every_broadcast(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    shape: tuple[int, ...],
    width: int,
    kind: Any,
) -> None:
    whole, other = (tuple(width if size == 32 else size for size in each) for each in (WHOLE, shape))
    random = np.random.default_rng(0)
    feeds = {"x": random.normal(size=whole).astype(kind), "y": random.normal(size=other).astype(np.float32)}
    nodes = [
        helper.make_node("Mul", ["y", "half"], ["small"]),
        helper.make_node("Add", ["small", "y"], ["s"]),
        helper.make_node("Cast", ["x"], ["w"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["w", "s"], ["p"]),
        helper.make_node("Sub", ["p", "w"], ["z"]),
    ]
    model = model_of(nodes, feeds, {"z": TensorProto.FLOAT, "s": TensorProto.FLOAT})
    shapes.infer(model, [])
    fused, taken = fuse(model)
    assert taken >= 3
    folder = tmp_path_factory.getbasetemp()
    session = session_of(operators_here(folder, monkeypatch), fused.SerializeToString())
    z, s = session.run(["z", "s"], feeds)
    expected = feeds["y"] * np.float32(0.5) + feeds["y"]
    wide = feeds["x"].astype(np.float32)
    np.testing.assert_array_equal(s, expected)
    np.testing.assert_array_equal(z, wide * expected - wide)


class Memory:
    """A GPU's memory that is reserved and set to 0."""

    gpu = SimpleNamespace(capability=(9, 0))
    stream = 0
    capturing = False

    def __init__(self) -> None:
        self.zeroed: list[tuple[int, int]] = []
        self._end = 256

    def reserve(self, size: int) -> int:
        self._end += size
        return self._end - size

    def zero(self, target: int, size: int) -> None:
        self.zeroed.append((target, size))


def test_counters_are_set_to_zero_once_and_never_move_in_a_captured_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, memory = operators_here(tmp_path, monkeypatch), Memory()
    monkeypatch.setattr(made, "_device", memory)
    few = made.counters(3)
    assert made.counters(900) == few
    many = made.counters(5000)
    assert made.counters(3) == many
    assert memory.zeroed == [(few, 4 * 1024), (many, 4 * 5000)]
    memory.capturing = True
    assert made.counters(5000) == many
    with pytest.raises(OrtflowError, match="captured"):
        made.counters(5001)


class Doubled:
    """Copies its input twice, on the host."""

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        self.words = attributes["words"]

    def run(self, call: Call) -> None:
        given = call.given(0)
        if self.words != "well":
            raise ValueError(self.words)
        size = int(np.prod(given.shape)) * 2
        pointer = call.output(0, (2, *given.shape))
        for half in range(2):
            ctypes.memmove(pointer + half * size, given.pointer, size)
        assert call.inputs[1] is None
        assert call.types == [TensorProto.FLOAT16]


@pytest.mark.parametrize("words", ["well", "not today"])
def test_a_node_is_computed_by_its_class_and_reports_why_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    monkeypatch.setattr(table, "OPERATORS", {"Doubled": Doubled})
    feeds = {"x": np.arange(6, dtype=np.float16).reshape(2, 3)}
    node = helper.make_node("Doubled", ["x", ""], ["y"], domain="ortflow.cuda", words=words)
    model = model_of([node], feeds, {"y": TensorProto.FLOAT16})
    session = session_of(operators_here(tmp_path, monkeypatch), model.SerializeToString())
    if words == "well":
        np.testing.assert_array_equal(session.run(["y"], feeds)[0], np.stack([feeds["x"]] * 2))
    else:
        with pytest.raises(Exception, match="Doubled: not today"):
            session.run(["y"], feeds)


def test_a_value_of_unknown_type_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [
        helper.make_node("Doubled", ["x", ""], ["between"], domain="ortflow.cuda", words="well"),
        helper.make_node("Doubled", ["between", ""], ["y"], "second", domain="ortflow.cuda", words="well"),
    ]
    model = model_of(nodes, {"x": np.zeros(1, np.float16)}, {"y": TensorProto.FLOAT16})
    monkeypatch.setattr(table, "OPERATORS", {"Doubled": Doubled})
    with pytest.raises(OrtflowError, match=r"element type of .*between"):
        operators_here(tmp_path, monkeypatch).bind(model.SerializeToString())


@pytest.mark.parametrize("kind", [np.float32, np.float16])
@pytest.mark.parametrize("width", [32, 33, 520])
@pytest.mark.parametrize("rows", [(), (1,), (7, 3), (40, 30), (0,)], ids=str)
def test_results_that_are_also_summed_over_their_rows(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    rows: tuple[int, ...],
    width: int,
    kind: Any,
) -> None:
    """A product with a vector, and a number for each row: as the gradient of an activation behind a bias."""
    random = np.random.default_rng(0)
    feeds = {
        "x": random.normal(size=(*rows, 1, width)).astype(kind),
        "each": random.normal(size=(*rows, 1, 1)).astype(np.float32),
        "bias": random.normal(size=width).astype(np.float32),
    }
    wide = [helper.make_node("Cast", ["x"], ["single"], to=TensorProto.FLOAT)] if kind == np.float16 else []
    nodes = [
        *wide,
        helper.make_node("Add", ["single" if wide else "x", "bias"], ["a"]),
        helper.make_node("Mul", ["a", "each"], ["y"]),
        helper.make_node("ColumnSums", ["y"], ["sums"], domain="ortflow.cuda"),
    ]
    model = model_of(nodes, feeds, {"y": TensorProto.FLOAT, "sums": TensorProto.FLOAT})
    if rows == (0,):
        for given in model.graph.input[:2]:
            given.type.tensor_type.shape.dim[0].dim_param = "rows"
    shapes.infer(model, [])
    fused, taken = fuse(model)
    assert taken == len(nodes) - 1
    assert [node.op_type for node in fused.graph.node] == ["FusedSums", "ColumnSums"]
    summed: list[np.ndarray] = []

    class Sums:
        def __init__(self, attributes: Any) -> None:
            assert attributes["axes"] == 1

        def run(self, call: Call) -> None:
            x = call.given(0)
            memory = (ctypes.c_float * int(np.prod(x.shape))).from_address(x.pointer)
            summed.append(np.array(memory, np.float32).reshape(x.shape))
            total = summed[-1].sum(0, dtype=np.float32)
            ctypes.memmove(call.output(0, x.shape[1:]), total.ctypes.data, total.nbytes)

    monkeypatch.setitem(table.OPERATORS, "ColumnSums", Sums)  # type: ignore[arg-type]
    made = operators_here(tmp_path_factory.getbasetemp(), monkeypatch)
    y, sums = session_of(made, fused.SerializeToString()).run(["y", "sums"], feeds)
    expected = (feeds["x"].astype(np.float32) + feeds["bias"]) * feeds["each"]
    np.testing.assert_allclose(y, expected, rtol=1e-6, atol=1e-6)
    exact = expected.astype(np.float64).reshape(-1, width)
    np.testing.assert_allclose(sums, exact.sum(0), rtol=1e-5, atol=1e-5 * np.abs(exact).sum(0).max(initial=0))
    lanes = attributes_of(fused.graph.node[0])["lanes"]
    assert summed[0].shape == (shape_of_sums(y.shape, lanes) if y.size else (0, width)), "as memory is predicted"
