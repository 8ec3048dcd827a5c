"""The whole training graph in half precision: its nodes, and that it differs from fp32 only by rounding."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from composed_attention import compose_attention
from cuda_composed import composed
from graph_build_models import built
from onnx import TensorProto
from safetensors.numpy import load_file

from ortflow.workflow.fusion import halved as form
from ortflow.workflow.graph.forms import Form
from ortflow.workflow.graph.memory.element_types import element_types
from ortflow.workflow.graph.types import LOSS_SCALE, GraphSet
from ortflow.workflow.onnx_runtime import onnxruntime

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "gpt"))
from model import Config, build

GPT = Config(vocabulary=64, context=32, width=64, heads=4, layers=2)
SCALE = 8.0


def graphs_in(folder: Path, precision: str, **changes: Any) -> GraphSet:
    onnx.save(build(GPT), folder / "model.onnx")
    return built(
        folder / "model.onnx", resources__gpus_per_rank=1, data__micro_batch=4, train__precision=precision, **changes
    )


@pytest.mark.parametrize(("precision", "kind"), [("fp16", TensorProto.FLOAT16), ("bf16", TensorProto.BFLOAT16)])
def test_what_stands_in_the_graph_of_a_gpt(tmp_path: Path, precision: str, kind: int) -> None:
    model = onnx.load(Form.HALF.of(graphs_in(tmp_path, precision).train))
    types, counts = element_types(model), Counter(node.op_type for node in model.graph.node)
    assert (counts["Attention"], counts["AttentionGrad"]) == (2, 2)
    assert (counts["CrossEntropyWithGrad"], counts["TableGrad"]) == (1, 1)
    assert (counts["LayerNormalization"], counts["LayerNormalizationGrad"]) == (5, 5)
    assert not counts["Split"], "attention reads the projection unsplit"
    norms = [node for node in model.graph.node if node.op_type == "LayerNormalizationGrad"]
    assert sorted(len(node.input) for node in norms) == [5, 6, 6, 6, 6], "a norm's residual is added there"
    assert [len(node.output) for node in norms] == [4, 4, 4, 4, 3], (
        "and summed for the bias before, but the first one's"
    )
    assert {types[node.input[5]] for node in norms if len(node.input) > 5} == {kind}
    fused = [node for node in model.graph.node if node.op_type == "Fused"]
    assert {len(node.output) for node in fused} == {1}, "the forward pass stores nothing for Gelu's gradient"
    assert not counts["Softmax"] + counts["Erf"] + counts["Exp"], "the elementwise nodes are fused"
    assert not counts["MatMul"] + counts["FusedMatMul"] + counts["Gemm"] + counts["Transpose"]
    products = [node for node in model.graph.node if node.op_type == "Product"]
    assert len(products) > 20
    assert {types[name] for node in products for name in node.input} == {kind}
    gradients = {value.name for value in model.graph.output}
    assert all(
        types[node.output[0]] == (TensorProto.FLOAT if node.output[0] in gradients else kind) for node in products
    )
    assert sum(node.output[0] in gradients for node in products) == 8, "weights of linear layers"
    assert sum(len(node.input) == 3 for node in products) == 2, "with the bias of the projections"
    assert {value.type.tensor_type.elem_type for value in model.graph.output} == {TensorProto.FLOAT}
    assert (LOSS_SCALE in {value.name for value in model.graph.input}) == (precision == "fp16")


def test_the_same_bytes_each_time(tmp_path: Path) -> None:
    """Built in two processes with different hash seeds, with recomputation of layers: the same files."""
    assert os.environ.get("PYTHONHASHSEED", "random") != "1", "this process is one of the two"
    graphs_in(tmp_path, "fp16", model__recompute="layers")
    files = [{path.name: path.read_bytes() for path in (tmp_path / "graphs").iterdir()}]
    script = (
        "import sys; from pathlib import Path; sys.path[:0] = sys.argv[2:]; import test_halved\n"
        "test_halved.graphs_in(Path(sys.argv[1]), 'fp16', model__recompute='layers')"
    )
    here = Path(__file__).parent
    arguments = [sys.executable, "-c", script, *map(str, (tmp_path, here, here.parent / "support"))]
    before = {path: path.stat().st_ino for path in (tmp_path / "graphs").iterdir()}
    subprocess.run(arguments, check=True, env={"PYTHONHASHSEED": "1", "PATH": ""})
    assert before != {path: path.stat().st_ino for path in (tmp_path / "graphs").iterdir()}, "they are written again"
    files.append({path.name: path.read_bytes() for path in (tmp_path / "graphs").iterdir()})
    assert [name for name, content in files[0].items() if files[1][name] != content] == []


@pytest.mark.parametrize(
    ("again", "layers"), [([], 0), (["h.0"], 1), ("layers", 2)], ids=["kept", "computed again", "layers"]
)
def test_without_rounding_the_gradient_is_that_of_the_fp32_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: list[str] | str, layers: int
) -> None:
    monkeypatch.setattr(form, "half", lambda model, **rest: model)
    monkeypatch.setattr(form, "on_cuda", lambda model: model)
    monkeypatch.setattr(form, "fused", lambda model: model)
    graphs = graphs_in(tmp_path, "fp16", model__recompute=again)
    train = onnx.load(Form.HALF.of(graphs.train))
    assert sum(node.op_type == "Attention" for node in train.graph.node) == 2 + layers
    random = np.random.default_rng(0)
    feeds = {name: random.integers(0, GPT.vocabulary, (4, GPT.context)) for name in ("tokens", "labels")}
    feeds |= load_file(graphs.initial) | {LOSS_SCALE: np.array([SCALE], np.float32)}
    results = []
    for model in (onnx.load(graphs.train), composed(compose_attention(train))):
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        names = [value.name for value in session.get_outputs()]
        values = session.run(names, {value.name: feeds[value.name] for value in session.get_inputs()})
        results.append(dict(zip(names, values, strict=True)))
    exact, mine = results
    assert exact.keys() == mine.keys()
    for name, array in exact.items():
        factor = SCALE if name.endswith("_grad") else 1.0
        apart = np.linalg.norm(mine[name] / factor - array) / np.linalg.norm(array)
        assert apart < 1e-5, (name, apart)
