"""`model.start_from` reads what `torch.save` writes, without PyTorch, and a run starts from a module's state_dict."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch.onnx", reason="PyTorch is not installed")
import numpy as np
import torch
from flat import FlatRun
from reference import OPTIMIZER
from safetensors.numpy import load_file
from torch import nn

import ortflow
from ortflow.workflow.assembly.build import build_graphs
from ortflow.workflow.errors import UserError
from ortflow.workflow.spec.run import TrainerRunSpec
from ortflow.workflow.weights.pickled import read_pickled
from ortflow.workflow.weights.table import as_float32


def test_every_kind_of_tensor(tmp_path: Path) -> None:
    whole = torch.randn(6, 4)
    tensors = {
        "plain": whole,
        "transposed": whole.T,
        "part": whole[2:4, 1:],
        "expanded": torch.tensor([3.0]).expand(5),
        "parameter": nn.Parameter(torch.randn(3)),
        "half": torch.randn(3).half(),
        "bfloat": torch.randn(7).bfloat16(),
        "double": torch.randn(2).double(),
        "count": torch.tensor(41),
        "mask": torch.tensor([True, False]),
        "empty": torch.empty(0, 3),
    }
    path = tmp_path / "w.pt"
    for saved in (tensors, OrderedDict(tensors), {"epoch": 3, "lr": 0.1, "state_dict": tensors}):
        torch.save(saved, path)
        found = read_pickled(path)
        assert [*found] == [*tensors]
        for name, tensor in tensors.items():
            value = found[name].read()
            assert found[name].shape == tuple(tensor.shape) == value.shape
            floats = tensor.is_floating_point()
            read = as_float32(value, found[name].dtype) if floats else value
            np.testing.assert_array_equal(read, tensor.detach().float().numpy() if floats else tensor.numpy())


def test_a_whole_module_is_refused(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2), tmp_path / "w.pt")
    with pytest.raises(UserError, match=r"names torch\.nn\.modules\.linear\.Linear, which is not part of a tensor"):
        read_pickled(tmp_path / "w.pt")
    torch.save({"a": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(UserError, match="not a zip archive"):
        read_pickled(tmp_path / "old.pt")


class Tied(nn.Module):
    """A table that is also the head, a BatchNormalization, and a layer that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.unused = nn.Embedding(11, 6), nn.BatchNorm1d(6), nn.Linear(2, 2)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.table(tokens).mean(1)))


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_a_run_from_a_state_dict_computes_what_its_module_does(tmp_path: Path) -> None:
    torch.manual_seed(1)
    exported, pretrained = Tied(), Tied()
    pretrained.norm.running_mean += 0.5
    pretrained.norm.num_batches_tracked += 17
    tokens = torch.randint(0, 11, (5, 3))
    ortflow.export_for_training(exported, {"tokens": tokens}, tmp_path / "model.onnx")
    torch.save({f"module.{name}": value for name, value in pretrained.state_dict().items()}, tmp_path / "w.pt")
    section: dict[str, Any] = {"path": str(tmp_path / "w.pt"), "names": {"module.*": "*"}}
    values = {
        "name": "torch",
        "model": {"path": str(tmp_path / "model.onnx"), "loss": {"kind": "cross_entropy"}, "start_from": section},
        "data": {"train": {"path": "unused"}, "micro_batch": 1},
        "train": {"steps": 1, "optimizer": OPTIMIZER.model_dump()},
    }
    graphs = build_graphs(TrainerRunSpec.model_validate(values), tmp_path / "graphs")
    for name, value in load_file(graphs.initial).items():
        np.testing.assert_array_equal(value, pretrained.state_dict()[name].numpy())
    batch = {"tokens": tokens.numpy(), "labels": np.arange(5)}
    loss = FlatRun(graphs, OPTIMIZER).step(batch)
    expected = nn.functional.cross_entropy(pretrained.train()(tokens), torch.arange(5)).item()
    assert loss == pytest.approx(expected, rel=1e-5)
    kept = load_file(graphs.state_dict)
    assert kept["norm.num_batches_tracked"] == 17
    np.testing.assert_array_equal(kept["unused.weight"], pretrained.unused.weight.detach().numpy())
