"""ZeRO's stage 3 on exported transformers: their layers, and the curve on real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch.onnx", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
import numpy as np
import onnx
from sharing_ranks import SAMPLES, Job, graphs_of, run_ranks, train
from workshop import CASES, Workshop

from ortflow.workflow.comm.solo import SoloCommunicator
from ortflow.workflow.graph.forms import Form
from ortflow.workflow.graph.shards import layer_groups as layers
from ortflow.workflow.graph.shards.graphs import layers_in, sharded
from ortflow.workflow.graph.shards.program import Fetch, Send
from ortflow.workflow.graph.types import GraphSet

STEPS = 20
SMALL = "64"
SGD = {"name": "sgd", "lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1}
NAMES = ("gpt2", "bert", "llama", "t5")
BLOCKS = {"gpt2": ["h.0", "h.1"], "bert": ["layer.0", "layer.1"], "llama": ["layers.0", "layers.1"]}


def prepared(workshop: Workshop, name: str, exporter: str, opset: int) -> GraphSet:
    """The graphs, beside the model, with those of the update."""
    loss = CASES[name].loss.model_dump(mode="json")
    return GraphSet.load(Path(graphs_of(workshop.model(name, exporter, opset), model__loss=loss, train__optimizer=SGD)))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "SMALL", int(SMALL))


@pytest.mark.parametrize(("exporter", "opset"), [("for_training", 18), ("torchscript", 17)])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("small")
def test_layers_are_the_blocks_of_the_model(name: str, exporter: str, opset: int, workshop: Workshop) -> None:
    graphs = workshop.graphs(name, exporter, opset)
    found = layers_in(onnx.load(graphs.train).graph, graphs.index)
    trained = {entry.name for entry in graphs.index if entry.tensor.group in ("decay", "no_decay")}
    tensors = [each for layer in found for each in layer.tensors]
    assert len(tensors) == len(set(tensors))
    assert set(tensors) == trained
    for block in BLOCKS.get(name, ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"]):
        homes = {layer.name for layer in found for each in layer.tensors if f"{block}." in each}
        assert len(homes) == 1, (block, homes)
    parts = sharded(graphs.train, Form.KERNELS.of(graphs.train), graphs.eval, graphs.index)
    for model, program in (parts.train, parts.eval):
        onnx.checker.check_model(without_ours(model))
        fetched = [each for step in program if isinstance(step, Fetch) for each in step.tensors]
        assert set(fetched) == trained
    sent = [each for step in parts.train[1] if isinstance(step, Send) for each in step.tensors]
    assert sorted(sent) == sorted(trained)


def without_ours(model: onnx.ModelProto) -> onnx.ModelProto:
    """The checker knows ONNX's operators alone."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    ours = {node.domain for node in copy.graph.node} - {"", "ai.onnx", "ortflow"}
    for domain in ours - {each.domain for each in copy.opset_import}:
        copy.opset_import.append(onnx.helper.make_opsetid(domain, 1))
    return copy


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_curve_is_that_without_zero(ranks: int, workshop: Workshop, tmp_path: Path) -> None:
    jobs = []
    for name in NAMES:
        graphs = prepared(workshop, name, "for_training", 18)
        batches = list(CASES[name].batches(STEPS, SAMPLES))
        arrays = tmp_path / f"{name}.npz"
        np.savez(arrays, **{each: np.concatenate([batch[each] for batch in batches]) for each in batches[0]})
        changes = {
            "model__loss": CASES[name].loss.model_dump(mode="json"), "train__optimizer": SGD, "train__clip_norm": 1.0,
            "resources__kernels": "auto",
        }  # fmt: skip
        jobs += [
            Job(f"{name}.{stage}", str(graphs.root), changes, stage, 2, STEPS, arrays=str(arrays)) for stage in (0, 3)
        ]
    found = run_ranks(ranks, tmp_path / "world", jobs, SMALL=SMALL)
    for name in NAMES:
        plain, shared = found[0][f"{name}.0"], found[0][f"{name}.3"]
        assert np.isfinite(plain.curve).all()
        begun = train(Job(**{**vars(jobs[2 * NAMES.index(name)]), "steps": 0}), SoloCommunicator())
        assert np.abs(plain.state["parameters"] - begun.state["parameters"]).max() > 1e-3, "training changes nothing"
        np.testing.assert_allclose(shared.curve[:, 0], plain.curve[:, 0], rtol=1e-5, err_msg=name)
        whole = np.concatenate([rank[f"{name}.3"].state["parameters"] for rank in found])
        np.testing.assert_allclose(whole, plain.state["parameters"], rtol=1e-5, atol=1e-5, err_msg=name)
