"""The operators of `ortflow.cuda` as ONNX Runtime calls them: signatures, outputs, failures, and broadcasts."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path
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
