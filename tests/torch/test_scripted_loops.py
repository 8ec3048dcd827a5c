"""Loops of TorchScript, whose number of iterations is an input of the model, against PyTorch."""

from __future__ import annotations

import contextlib
import io
import warnings

import pytest

pytest.importorskip("torch.onnx", reason="PyTorch is not installed")
import numpy as np
import onnx
import torch
from torch import nn

import ortflow
from ortflow.workflow.onnx_runtime import onnxruntime


class Recurrence(nn.Module):
    """A cell in a loop, with a branch on the number of the iteration and a stop that depends on the state."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        h = torch.zeros_like(x[0])
        for t in range(int(count)):
            h = torch.tanh(self.inner(h) + x[t])
            if t % 2 == 1:
                h = h + self.outer(h)
        i = 0
        while float(h.detach().abs().sum()) > 1.0 and i < 8:
            h = h * 0.5
            i += 1
        return h


@pytest.mark.parametrize("count", [1, 2, 5])
def test_gradients_of_a_scripted_loop(count: int) -> None:
    module, x = Recurrence(), torch.randn(5, 3, 4)
    file = io.BytesIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(module)
        torch.onnx.export(
            scripted, (x, torch.tensor(3)), file, dynamo=False, opset_version=17, input_names=["x", "count"],
            output_names=["y"], do_constant_folding=False,
        )  # fmt: skip
    model = onnx.load_from_string(file.getvalue())
    assert any(node.op_type == "Loop" for node in model.graph.node)
    names = [name for name, _ in module.named_parameters()]
    made = ortflow.grad(model, "y", ["x", *names])
    given = x.clone().requires_grad_(True)
    result = module(given, torch.tensor(count))
    dy = torch.randn_like(result)
    expected = torch.autograd.grad(result, [given, *module.parameters()], dy, allow_unused=True)
    session = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {"x": x.numpy(), "count": np.array(count), "y_grad": dy.numpy()}
    y, *found = session.run(["y", *(f"{name}_grad" for name in ("x", *names))], feeds)
    np.testing.assert_allclose(y, result.detach().numpy(), rtol=1e-5, atol=1e-6)
    for name, array, gradient in zip(("x", *names), found, expected, strict=True):
        wanted = np.zeros_like(array) if gradient is None else gradient.numpy()
        np.testing.assert_allclose(array, wanted, rtol=1e-4, atol=1e-6, err_msg=name)
