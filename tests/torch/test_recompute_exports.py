"""`model.recompute: layers` on exports: which layers are found, the same bits, and fewer values kept."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("torch.onnx", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("torchvision", reason="torchvision is not installed")
import numpy as np
import onnx
import torch
import torchvision
from graph_build_models import run_file, tensors_of
from workshop import CASES, Workshop

import ortflow
from ortflow.workflow.assembly.build import build_graphs
from ortflow.workflow.graph.memory.concrete import concrete
from ortflow.workflow.graph.memory.peak_memory import peak_of, sizes_of
from ortflow.workflow.graph.types import GraphSet
from ortflow.workflow.onnx_runtime import onnxruntime

pytestmark = pytest.mark.rotates
LEVELS = onnxruntime.GraphOptimizationLevel
EXPORTS = [("for_training", 18), ("torchscript", 17)]
LAYERS = {"gpt2": (2, 2), "bert": (2, 3), "llama": (2, 2), "t5": (5, 6), "vit": (2, 2), "whisper": (4, 5)}
"""Case -> number of layers, which may include what lies between an encoder and a decoder, or behind the last layer."""


def both(path: Path, folder: Path, **changes: object) -> tuple[GraphSet, GraphSet]:
    """The graphs without recomputation and with it."""
    spec = run_file(path, **changes)
    found = []
    for recompute in ([], "layers"):
        section = spec.model.model_copy(update={"recompute": recompute})
        found.append(build_graphs(spec.model_copy(update={"model": section}), folder / f"{recompute or 'kept'}"))
    return found[0], found[1]


def same_bits(kept: GraphSet, again: GraphSet, batch: dict[str, np.ndarray]) -> None:
    """Equal outputs from the two training graphs, dropout included, where both run the same kernels.

    ONNX Runtime's optimizer fuses a scaling into a product if nothing else reads the scaled value any more.
    """
    for level in (LEVELS.ORT_DISABLE_ALL, LEVELS.ORT_ENABLE_ALL):
        results = []
        for graphs in (kept, again):
            onnxruntime.set_seed(5)
            options = onnxruntime.SessionOptions()
            options.graph_optimization_level = level
            session = onnxruntime.InferenceSession(str(graphs.train), options, providers=["CPUExecutionProvider"])
            names = [made.name for made in session.get_outputs()]
            feeds = {**tensors_of(graphs), **batch}
            found = session.run(names, {given.name: feeds[given.name] for given in session.get_inputs()})
            results.append(dict(zip(names, found, strict=True)))
        assert results[0].keys() == results[1].keys()
        for name, array in results[0].items():
            if level == LEVELS.ORT_DISABLE_ALL:
                np.testing.assert_array_equal(results[1][name], array, err_msg=name)
            else:
                np.testing.assert_allclose(results[1][name], array, rtol=1e-4, atol=1e-4, err_msg=name)


def held(graphs: GraphSet, batch: dict[str, np.ndarray]) -> int:
    """Bytes of the training graph's values at their peak."""
    model = onnx.load(graphs.train)
    types = concrete(model, {name: array.shape for name, array in batch.items()})
    bound = {value.name for value in (*model.graph.input, *model.graph.output)}
    return peak_of(model.graph, sizes_of(types), bound).size


@pytest.mark.parametrize("exporter", EXPORTS, ids=lambda each: each[0])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_transformers(name: str, exporter: tuple[str, int], workshop: Workshop, tmp_path: Path) -> None:
    case = CASES[name]
    path = workshop.model(name, *exporter)
    kept, again = both(path, tmp_path, loss=case.loss.model_dump(), model__labels=list(case.labels))
    (note,) = [note for note in again.notes if "layers found" in note]
    low, high = LAYERS[name]
    assert low <= int(note.split()[0]) <= high, note
    (batch,) = case.batches(1)
    same_bits(kept, again, batch)
    operators = [Counter(node.op_type for node in onnx.load(each.train).graph.node) for each in (kept, again)]
    assert operators[1]["Softmax"] > operators[0]["Softmax"], "attention is computed again"
    assert held(again, batch) < held(kept, batch)


@pytest.mark.parametrize(("name", "layers"), [("resnet18", 5), ("resnet50", 16), ("vit_b_16", 12)])
def test_layers_of_image_models(name: str, layers: int, tmp_path: Path) -> None:
    """Residual stages, each with a first block that differs; and a transformer with dropout."""
    torch.manual_seed(0)
    side = {"image_size": 64} if name.startswith("vit") else {}
    module = torchvision.models.get_model(name, num_classes=10, **side)
    path = tmp_path / "m.onnx"
    ortflow.export_for_training(module, torch.randn(2, 3, 64, 64), path, input_names=["x"])
    kept, again = both(path, tmp_path)
    (note,) = [note for note in again.notes if "layers found" in note]
    assert int(note.split()[0]) == layers, note
    random = np.random.default_rng(0)
    batch = {"x": random.normal(size=(4, 3, 64, 64)).astype("float32"), "labels": random.integers(0, 10, 4)}
    same_bits(kept, again, batch)
    assert held(again, batch) < 0.95 * held(kept, batch)
