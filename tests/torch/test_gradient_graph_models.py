"""`ortflow.grad` of exported modules, against PyTorch's gradients in double precision."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

pytest.importorskip("torch.onnx", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
import module_models
import numpy as np
import onnx
import torch
from case import Case

import ortflow
from ortflow.workflow.onnx_runtime import onnxruntime

CASES = [*islice(module_models.convolutions(), 3), *islice(module_models.products(), 3)]


@pytest.mark.rotates
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients_of_a_module(case: Case, tmp_path: Path) -> None:
    module, example = case.module(), case.example()
    path = ortflow.export_for_training(module, example, tmp_path / "model.onnx")
    model = onnx.load(path)
    held = {tensor.name for tensor in model.graph.initializer}
    names = [name for name, parameter in module.named_parameters() if parameter.requires_grad and name in held]
    output = model.graph.output[0].name
    made = ortflow.grad(path, output, [*names])
    assert not any(node.domain for node in made.graph.node)
    read = {value.name for value in made.graph.input}
    (batch,) = case.batches(1)
    feeds = {name: array for name, array in batch.items() if name in read}
    precise = module.double()
    given = {n: torch.from_numpy(a) for n, a in feeds.items()}
    result = precise(**{n: a.double() if a.is_floating_point() else a for n, a in given.items()})
    result = getattr(result, "logits", result)
    weights = np.random.default_rng(1).normal(size=result.shape)
    (result * torch.from_numpy(weights)).sum().backward()
    session = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    wanted = [output, *(f"{name}_grad" for name in names)]
    found = session.run(wanted, {**feeds, f"{output}_grad": weights.astype(np.float32)})
    np.testing.assert_allclose(found[0], result.detach().numpy(), rtol=1e-4, atol=1e-4)
    parameters = dict(precise.named_parameters())
    for name, array in zip(names, found[1:], strict=True):
        expected = parameters[name].grad.numpy()  # type: ignore[union-attr]
        np.testing.assert_allclose(
            array, expected, rtol=1e-3, atol=1e-4 * max(1.0, np.abs(expected).max()), err_msg=name
        )
