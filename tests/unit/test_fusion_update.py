"""Updates as GPUs with ortflow's kernels run them: as the plain form, in place, with nothing that is not captured."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from operators_on_cpu import needs_compilers, operators_here, session_of
from test_optim_queued import OPTIMIZERS, one

from ortflow.workflow.fusion.update import fused_update
from ortflow.workflow.graph.autodiff.compose import compose
from ortflow.workflow.graph.ir.edit import described, dims_of
from ortflow.workflow.graph.ir.in_place import late_reader
from ortflow.workflow.onnx_runtime import onnxruntime as ort
from ortflow.workflow.optim.copies import without_copies
from ortflow.workflow.optim.gradient import FACTOR
from ortflow.workflow.optim.graph import optimizer_graph
from ortflow.workflow.optim.guard import guarded
from ortflow.workflow.optim.segments import Segment
from ortflow.workflow.spec.optimizers import Adafactor, Adam, Muon, Optimizer

RULES: list[Optimizer] = [*OPTIMIZERS, Muon(name="muon", lr=0.02), Adafactor(name="adafactor", lr=0.05)]
SEGMENTS = [
    Segment(0, 192, 0.1, averaged=True, shape=(9, 17), lr_scale=0.5),
    Segment(192, 512, 0.0, averaged=True, shape=(5, 8, 8)),
    Segment(512, 576, 0.0, averaged=True),
    Segment(576, 704, 0.1, averaged=True, shape=(1, 100)),
]
SIZES = (153, 320, 64, 100)
BY_KERNELS = [rule for rule in RULES if rule.name in ("adamw", "rmsprop", "muon", "adafactor")]


def segments_for(rule: Optimizer) -> list[Segment]:
    if rule.name == "adafactor":
        return [Segment(512, 576, 0.0, averaged=True, shape=(64,)) if cut.shape is None else cut for cut in SEGMENTS]
    return SEGMENTS


def update_of(rule: Optimizer) -> onnx.ModelProto:
    return compose(optimizer_graph(rule, segments_for(rule)))


def feeds_of(model: onnx.ModelProto, factor: float) -> dict[str, Any]:
    """Padding is 0, as in the flat buffers; moments are positive."""
    random, feeds = np.random.default_rng(3), dict[str, Any]()
    for value in model.graph.input:
        name, _, number = value.name.rpartition(".")
        if number.isdigit():
            array = random.normal(size=value.type.tensor_type.shape.dim[0].dim_value).astype(np.float32)
            if name not in ("parameters", "gradients", "average"):
                array = np.abs(array) * (0.1 if name == "gradient_average" else 1) + 0.1
            array[SIZES[int(number)] :] = 0
            feeds[value.name] = array.astype(np.float32)
    return {
        **feeds, "learning_rate": one(1e-2), "average_rate": one(0.3), "step": np.array([3]), FACTOR: one(factor),
    }  # fmt: skip


def run(session: ort.InferenceSession, feeds: dict[str, Any]) -> dict[str, Any]:
    names = [value.name for value in session.get_outputs()]
    wanted = {value.name for value in session.get_inputs()}
    found = session.run(names, {name: array for name, array in feeds.items() if name in wanted})
    return dict(zip(names, found, strict=True))


def plain_session(model: onnx.ModelProto) -> ort.InferenceSession:
    onnx.checker.check_model(model)
    return ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


@needs_compilers
@pytest.mark.parametrize("rule", BY_KERNELS, ids=lambda rule: rule.name)
def test_fused_kernels_have_the_plain_update(rule: Optimizer, compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = update_of(rule)
    monkeypatch.setattr("ortflow.workflow.fusion.update.scalars_in_one", lambda model: (model, 0))
    fused, count = fused_update(plain, "fp16")
    assert count
    session, feeds = session_of(operators_here(compiled, monkeypatch), fused.SerializeToString()), feeds_of(fused, 0.5)
    multiplied = {name: a * np.float32(0.5) if name.startswith("gradients.") else a for name, a in feeds.items()}
    found, expected = run(session, feeds), run(plain_session(plain), multiplied)
    for number in range(len(SEGMENTS)):
        assert f"average.{number}.out" in expected
        halves = found[f"parameters.{number}.out"].astype(np.float16)
        np.testing.assert_array_equal(found[f"rounded.{number}"], halves)
    for name, array in expected.items():
        assert not np.array_equal(array, feeds[name.removesuffix(".out")]), name
        np.testing.assert_allclose(found[name], array, rtol=3e-6, atol=1e-6, err_msg=name)
    for name, array in run(session, feeds_of(fused, math.nan)).items():
        if name.endswith(".out"):
            np.testing.assert_array_equal(array, feeds[name.removesuffix(".out")], err_msg=name)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_no_buffer_is_read_behind_the_node_that_writes_it(rule: Optimizer, precision: str) -> None:
    update = update_of(rule)
    for model in (guarded(update), guarded(update, multiplied=True), fused_update(update, precision)[0]):
        late = late_reader(model.graph)
        assert late is None, late


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_nothing_of_an_update_copies_a_table_from_the_host(rule: Optimizer) -> None:
    """ONNX Runtime's kernels of Concat and Split do, for different sizes and for many."""
    for model in (guarded(update_of(rule)), fused_update(update_of(rule), "fp32")[0]):
        sizes = {name: dims_of(value) for name, value in described(model.graph).items()}
        for node in model.graph.node:
            if node.op_type == "Concat" and not node.domain:
                assert len({sizes.get(name) for name in node.input}) == 1, node
            assert node.op_type != "Split" or len(node.output) < 32, node


@pytest.mark.parametrize("rule", [rule for rule in RULES if isinstance(rule, Adam | Muon)], ids=lambda rule: rule.name)
def test_readers_of_copies_of_the_step_read_the_step(rule: Optimizer) -> None:
    update = update_of(rule)
    assert {"Tile", "Split"} <= {node.op_type for node in update.graph.node}
    changed = onnx.ModelProto.FromString(update.SerializeToString())
    without_copies(changed.graph)
    assert {"Tile", "Split"}.isdisjoint(node.op_type for node in changed.graph.node)
    feeds = feeds_of(update, 1.0)
    expected = run(plain_session(update), feeds)
    for name, array in run(plain_session(changed), feeds).items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)
    kernels = optimizer_graph(rule, segments_for(rule))
    without_copies(kernels.graph)
    assert {"Tile", "Split"} <= {node.op_type for node in kernels.graph.node}, "ONNX Runtime's kernel counts in place"


def test_parts_of_several_numbers_are_no_copies() -> None:
    graph = optimizer_graph(Adam(name="adam", lr=0.1), SEGMENTS[:2]).graph
    graph = compose(onnx.helper.make_model(graph)).graph
    (tile,) = [node for node in graph.node if node.op_type == "Tile"]
    for tensor in graph.initializer:
        if tensor.name == tile.input[1]:
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.array([4]), tensor.name))
    without_copies(graph)
    assert any(node.op_type == "Tile" for node in graph.node)


def test_the_halves_are_of_the_precision() -> None:
    for precision, kind in (("fp16", TensorProto.FLOAT16), ("bf16", TensorProto.BFLOAT16), ("fp32", None)):
        model, _ = fused_update(update_of(RULES[0]), precision)
        kinds = {v.type.tensor_type.elem_type for v in model.graph.output if v.name.startswith("rounded.")}
        assert kinds == ({kind} if kind else set())
