"""Trained weights go back to PyTorch: they load strictly, and the module computes what the exported model does."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch.onnx", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
import numpy as np
import torch
from case import Batch, Case
from flat import FlatRun, graphs_of
from reference import OPTIMIZER
from safetensors.torch import load_file
from torch import nn
from workshop import CASES, Workshop

import ortflow
from ortflow.exporter.state_dict import _entries
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.export.inference import export_inference
from ortflow.workflow.graph.types import GraphSet
from ortflow.workflow.onnx_runtime import onnxruntime
from ortflow.workflow.spec.model import CrossEntropy
from ortflow.workflow.weights.kept import read_kept
from ortflow.workflow.weights.table import Entry
from ortflow.workflow.weights.writing import write_safetensors, write_state_dict

LOSS = CrossEntropy(kind="cross_entropy")


class Packed(nn.Module):
    """PyTorch's attention, whose three projections are one parameter, beside what forward does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(8, 3))
        self.unused = nn.Linear(4, 4)
        self.register_buffer("codes", torch.arange(5))
        self.register_buffer("scale", torch.tensor([0.5], dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = self.attention(x, x, x, need_weights=False)[0] * self.scale.float()
        return self.head(self.norm(mixed.mean(1)))


def _sequences(generator: np.random.Generator, size: int) -> Batch:
    x = generator.normal(size=(size, 4, 8)).astype(np.float32)
    return {"x": x, "labels": generator.integers(0, 3, size)}


def _images(generator: np.random.Generator, size: int) -> Batch:
    return {"x": generator.normal(size=(size, 3, 32, 32)).astype(np.float32), "labels": generator.integers(0, 3, size)}


def timm_model(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        return pytest.importorskip("timm").create_model(name, num_classes=3)

    return build


def torchvision_model(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        return getattr(pytest.importorskip("torchvision").models, name)(num_classes=3)

    return build


OTHERS = {
    "packed": Case("packed", Packed, _sequences, LOSS),
    "torchvision-resnet18": Case("torchvision-resnet18", torchvision_model("resnet18"), _images, LOSS),
    "timm-resnet": Case("timm-resnet", timm_model("test_resnet"), _images, LOSS),
}
HELD = ("gpt2", "resnet", "lstm", "packed")


def graphs_for(name: str, workshop: Workshop, folder: Path) -> tuple[Case, GraphSet]:
    if name in CASES:
        return CASES[name], workshop.graphs(name, "for_training", 18)
    case = OTHERS[name]
    arguments = {key.replace("x", _first_argument(case), 1): value for key, value in case.example().items()}
    ortflow.export_for_training(case.module(), arguments, folder / "model.onnx")
    return case, graphs_of(folder / "model.onnx", case.loss, OPTIMIZER, folder / "graphs")


def _first_argument(case: Case) -> str:
    import inspect

    return next(iter(inspect.signature(case.module().forward).parameters))


@pytest.mark.parametrize(
    "name",
    [*HELD, *(pytest.param(n, marks=pytest.mark.rotates("weights")) for n in (*OTHERS, *CASES) if n not in HELD)],
)
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_weights_load_strictly_and_compute_what_the_export_does(name: str, workshop: Workshop, tmp_path: Path) -> None:
    case, graphs = graphs_for(name, workshop, tmp_path)
    run = FlatRun(graphs, OPTIMIZER)
    inputs = [value.name for value in run.train.get_inputs()]
    for batch in case.batches(3):
        run.step({key if key in inputs else inputs[0]: value for key, value in batch.items()})
    tensors = {entry.name: run.view("parameters", entry.name) for entry in graphs.index}
    entries = read_kept(graphs.root)
    assert entries is not None
    write_state_dict(tmp_path / "w.pt", entries, tensors)
    write_safetensors(tmp_path / "w.safetensors", entries, tensors, {})

    state = torch.load(tmp_path / "w.pt", weights_only=True)
    module, fresh = case.module(), case.module()
    expected = fresh.state_dict()
    assert list(state) == list(expected)
    assert {k: (v.dtype, v.shape) for k, v in state.items()} == {k: (v.dtype, v.shape) for k, v in expected.items()}
    repeated = load_file(tmp_path / "w.safetensors")
    assert all(torch.equal(state[key], repeated[key]) for key in expected)
    assert repeated.keys() == expected.keys()
    module.load_state_dict(state, strict=True)
    assert any(not torch.equal(state[key], expected[key]) for key in expected)
    if graphs.infer.exists() and not case.labels:
        _compare(case, graphs, module, tensors, tmp_path)


def _compare(case: Case, graphs: GraphSet, module: nn.Module, tensors: dict[str, np.ndarray], folder: Path) -> None:
    export_inference(graphs.infer, tensors, folder / "trained.onnx")
    session = onnxruntime.InferenceSession(str(folder / "trained.onnx"), providers=["CPUExecutionProvider"])
    example = case.example()
    feeds = dict(zip([value.name for value in session.get_inputs()], example.values(), strict=False))
    named = {n: example[n].numpy() if n in example else feeds[n].numpy() for n in feeds}
    (output, *_) = session.run(None, named)
    with torch.no_grad():
        made = module.eval()(*example.values()) if case.name in OTHERS else module.eval()(**example)
    made = getattr(made, case.loss.output or "logits", made) if not isinstance(made, torch.Tensor) else made
    np.testing.assert_allclose(output, made.numpy(), rtol=1e-4, atol=1e-5)


def test_weights_of_a_pytorch_without_unsigned_integers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch has them since 2.3: neither the export of a module nor its weights need them, bfloat16 included."""

    class Old(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name in ("uint16", "uint32", "uint64"):
                raise AttributeError(name)
            return getattr(torch, name)

        @staticmethod
        def from_numpy(array: np.ndarray) -> torch.Tensor:
            if array.dtype.kind == "u" and array.dtype.itemsize > 1:
                raise TypeError(f"can't convert np.ndarray of type numpy.{array.dtype}")
            return torch.from_numpy(array)

    old = Old("torch")
    old.__spec__ = torch.__spec__
    monkeypatch.setitem(sys.modules, "torch", old)
    module = nn.Linear(2, 1)
    module.register_buffer("level", torch.tensor([1.5, -2.0], dtype=torch.bfloat16))
    entries = list(_entries(module, [], []))
    write_state_dict(
        tmp_path / "w.pt", [*entries, Entry("scale", "BF16", (), "scale")], {"scale": np.float32(0.5).reshape(())}
    )
    codes = Entry("codes", "U32", (1,), value=np.ones(1, np.uint32))
    with pytest.raises(UserError, match="codes is of uint32, which PyTorch"):
        write_state_dict(tmp_path / "codes.pt", [codes], {})
    monkeypatch.undo()
    state = torch.load(tmp_path / "w.pt", weights_only=True)
    assert {name: value.dtype for name, value in state.items() if name in ("level", "scale")} == {
        "level": torch.bfloat16, "scale": torch.bfloat16,
    }  # fmt: skip
    assert torch.equal(state["level"], module.level)
    assert (state["scale"].shape, state["scale"].item()) == ((), 0.5)
