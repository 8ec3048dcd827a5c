"""Forms of a stage's graphs for GPUs: their chain computes the loss and the gradients of the undivided graph."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import stage_models
from composed_attention import compose_attention
from cuda_composed import composed
from kernels import LIBRARY, needs_kernels
from onnx import TensorProto
from stage_models import Array, Model, assert_same, batch_of, chain, opened

from ortflow.workflow.assembly import stage_forms
from ortflow.workflow.assembly.stages import Division, StageGraphs
from ortflow.workflow.fusion import halved
from ortflow.workflow.graph.domains import CUDA_DOMAIN
from ortflow.workflow.graph.forms import Form
from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.memory.element_types import element_types
from ortflow.workflow.graph.types import LOSS_SCALE, SEED
from ortflow.workflow.parallel.stage import HALF, StageSet

SCALE = 8.0


def divided(model: Model, root: Path, precision: str, chunks: int = 1, cut: str = "") -> StageGraphs:
    cuts = [[cut]] if cut else None
    return model.divided(Division(2, chunks, cuts, rows=4, length=16, precision=precision), root)


def without_fusion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what needs a GPU's compiler, or rounds."""
    monkeypatch.setattr(stage_forms, "fused", lambda model: model)
    monkeypatch.setattr(halved, "half", lambda model, **rest: model)
    monkeypatch.setattr(halved, "on_cuda", lambda model: model)


def on_cpu(model: onnx.ModelProto) -> onnx.ModelProto:
    return composed(compose_attention(model))


def chained(made: StageGraphs, feeds: dict[str, Array], form: Callable[[Path], Path]) -> dict[str, Array]:
    """The chain of a form's graphs, with ortflow's operators as functions."""
    files = dict(made.files)
    for stage in made.stages.stages:
        for path in (made.stages.forward(stage.number), made.stages.backward(stage.number)):
            if form(path) in files:
                files[path] = on_cpu(onnx.load_from_string(files[form(path)])).SerializeToString()
    return chain(dataclasses.replace(made, files=files), feeds, library=LIBRARY.path)


@pytest.mark.parametrize("form", [Form.CUDA.of, Form.FUSED.of])
@pytest.mark.parametrize("name", ["transformer", "convolutions"])
def test_in_fp32_a_gpu_s_stages_compute_the_undivided_gradient(
    name: str, form: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_fusion(monkeypatch)
    model = opened(getattr(stage_models, name)(tmp_path / "m.onnx"))
    made, batch = divided(model, tmp_path, "fp32", chunks=2), batch_of(name)
    assert_same(chained(made, {**model.source.tensors, **batch}, form), model.undivided(batch))


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_without_rounding_stages_in_half_precision_compute_the_same(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_fusion(monkeypatch)
    model = opened(stage_models.transformer(tmp_path / "m.onnx"))
    made, batch = divided(model, tmp_path, precision), batch_of("transformer")
    made.write()
    half = dataclasses.replace(made, stages=StageSet.load(tmp_path, HALF))
    assert half.stages.stages[0].trained == made.stages.stages[0].trained
    factor = SCALE if precision == "fp16" else 1.0
    feeds = {**model.source.tensors, **batch, LOSS_SCALE: np.array([SCALE], np.float32)}
    found = chained(half, feeds, lambda path: path)
    scaled = {name: array / factor if name.endswith("_grad") else array for name, array in found.items()}
    assert_same(scaled, model.undivided(batch))


@needs_kernels
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_both_passes_of_a_stage_draw_the_masks_of_the_undivided_graph(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both graphs read the seed. In half precision without attention, whose masks are cuDNN's."""
    without_fusion(monkeypatch)
    monkeypatch.setattr(halved, "attend", lambda model, parameters: (model, []))
    model = opened(stage_models.transformer(tmp_path / "m.onnx", dropout=0.3))
    made = divided(model, tmp_path, precision, cut="h.1.output")
    batch = {**batch_of("transformer"), SEED: np.array([77])}
    feeds, form = {**model.source.tensors, **batch}, Form.FUSED.of
    if precision == "bf16":
        made.write()
        made, form = dataclasses.replace(made, stages=StageSet.load(tmp_path, HALF)), lambda path: path
    for graph in (made.stages.forward, made.stages.backward):
        for number in range(2):
            found = onnx.load_from_string(made.files[form(graph(number))]).graph
            assert SEED in {value.name for value in found.input}
            assert "Dropout" in {node.op_type for node in found.node if node.domain == CUDA_DOMAIN}
    assert_same(chained(made, feeds, form), model.undivided(batch, kernels=True))


@pytest.mark.parametrize(("precision", "kind"), [("fp16", TensorProto.FLOAT16), ("bf16", TensorProto.BFLOAT16)])
def test_what_stands_in_the_graphs_in_half_precision(precision: str, kind: int, tmp_path: Path) -> None:
    made = divided(opened(stage_models.transformer(tmp_path / "m.onnx", width=128)), tmp_path, precision)
    made.write()
    half = StageSet.load(tmp_path, HALF)
    counts: Counter[str] = Counter()
    saved = set()
    for stage in half.stages:
        forward, backward = (onnx.load(path(stage.number)) for path in (half.forward, half.backward))
        for graph in (forward, backward):
            made_here = {name for node in graph.graph.node for name in node.output}
            given = {value.name for value in graph.graph.input} | {each.name for each in graph.graph.initializer}
            read = set[str]().union(*map(walk.inputs, graph.graph.node))
            assert read <= made_here | given, "nothing dangles"
            counts.update(node.op_type for node in graph.graph.node)
        types = element_types(forward)
        sent = {value.name for value in stage.sends}
        assert {types[name] for name in sent} <= {TensorProto.FLOAT, TensorProto.INT64}, "stages pass on fp32"
        read_back = {value.name for value in backward.graph.input}
        saved |= {types[value.name] for value in forward.graph.output if value.name in read_back - sent}
        assert {value.type.tensor_type.elem_type for value in backward.graph.output} == {TensorProto.FLOAT}
        names = {value.name for graph in (forward, backward) for value in graph.graph.input}
        assert (LOSS_SCALE in names) == (precision == "fp16" and stage is half.stages[-1])
    assert kind in saved, "activations are kept as halves"
    assert (counts["Attention"], counts["AttentionGrad"]) == (4, 4)
    assert counts["Fused"] + counts["FusedSums"] > 8
    assert not counts["Softmax"] + counts["MatMul"] + counts["Gemm"]
    assert not counts["NonZero"], "no sum looks for its axes at each run"
    whole = onnx.load(half.both(1))
    assert {value.name for value in whole.graph.output} >= {"ortflow.loss_sum", "wte.weight_grad"}
