"""Single operators as PyTorch exports them: the gradient of every parameter and of the input, against PyTorch in double
precision."""

from __future__ import annotations

import contextlib
import copy
import io
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch.onnx", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
import numpy as np
import torch
from flat import FlatRun, graphs_of
from operator_models import CASES, Operator
from reference import OPTIMIZER
from torch import nn

import ortflow
from ortflow.workflow.spec.model import Regression

TOLERANCE = 1e-5
"""Of each gradient's largest element; and a tenth of it of the largest gradient, where terms cancel."""


class Shifted(nn.Module):
    """An operator of x plus a parameter, whose gradient is that of x summed over the batch."""

    def __init__(self, operator: Operator) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.inner = operator.build()
        example = operator.example()
        self.shift = nn.Parameter(torch.zeros(example.shape[1:])) if example.is_floating_point() else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x if self.shift is None else x + self.shift)


def dynamo(module: nn.Module, x: torch.Tensor, path: Path) -> None:
    ortflow.export_for_training(module, {"x": x}, path)


def torchscript(module: nn.Module, x: torch.Tensor, path: Path, opset: int = 17, free: tuple[int, ...] = (0,)) -> None:
    """Export as the documentation does: without folding constants."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module,
            (x,),
            str(path),
            dynamo=False,
            opset_version=opset,
            input_names=["x"],
            output_names=["output"],
            dynamic_axes={"x": {axis: f"axis{axis}" for axis in free}},
            training=torch.onnx.TrainingMode.TRAINING,
            do_constant_folding=False,
        )


def free_axes(module: nn.Module, x: torch.Tensor, path: Path) -> None:
    """Height and width vary too."""
    torchscript(module, x, path, free=(0, *range(2, x.ndim)))


EXPORTERS: dict[str, Callable[[nn.Module, torch.Tensor, Path], None]] = {
    "dynamo": dynamo,
    "torchscript": torchscript,
    "free axes": free_axes,
}


@pytest.mark.parametrize(
    ("operator", "exporter"),
    [(operator, exporter) for operator in CASES for exporter in operator.exporters],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_gradients(operator: Operator, exporter: str, tmp_path: Path) -> None:
    module, x = Shifted(operator).train(), operator.example()
    EXPORTERS[exporter](module, x[:-1], tmp_path / "model.onnx")
    run = FlatRun(graphs_of(tmp_path / "model.onnx", Regression(kind="mse"), OPTIMIZER, tmp_path / "graphs"), OPTIMIZER)
    double = copy.deepcopy(module).double()
    output = double(x.double() if x.is_floating_point() else x)
    labels = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).float()
    nn.functional.mse_loss(output, labels.double()).backward()

    _, weight = run.gradients({"x": x.numpy(), "labels": labels.numpy()})

    names = {entry.name for entry in run.index if entry.tensor.group in ("decay", "no_decay")}
    gradients = {n: p.grad.numpy() for n, p in double.named_parameters() if p.grad is not None}
    assert gradients.keys() == names
    largest = max(np.abs(gradient).max() for gradient in gradients.values())
    for name, expected in gradients.items():
        bound = TOLERANCE * (np.abs(expected).max() + largest / 10)
        np.testing.assert_allclose(run.view("gradients", name) / weight, expected, rtol=0, atol=bound, err_msg=name)
    statistics = {name for name, buffer in double.named_buffers() if name.endswith("running_mean")}
    assert {e.name for e in run.index if e.tensor.group == "state" and e.name.endswith("mean")} == {
        name for name in statistics if double.get_submodule(name.rpartition(".")[0]).training
    }
