"""Adafactor against torch.optim's in double; Muon against its definition in double, and torch.optim's in bf16."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch.onnx", reason="PyTorch is not installed")
import numpy as np
import numpy.typing as npt
import onnx
import torch
from kernels import needs_kernels

from ortflow.workflow.graph.autodiff.compose import compose
from ortflow.workflow.kernels.graph import with_kernels
from ortflow.workflow.layout import FlatIndex, Tensor
from ortflow.workflow.onnx_runtime import onnxruntime as ort
from ortflow.workflow.optim.graph import optimizer_graph
from ortflow.workflow.optim.segments import segments
from ortflow.workflow.spec.optimizers import Adafactor, Muon, Optimizer, moments

Array = npt.NDArray[Any]
INDEX = FlatIndex.place(
    [
        Tensor("wide", (7, 29), "decay"),
        Tensor("tall", (37, 5), "decay"),
        Tensor("square", (8, 8), "decay"),
        Tensor("kernel", (4, 3, 3, 2), "decay"),
        Tensor("row", (1, 64), "decay"),
        Tensor("column", (64, 1), "decay"),
        Tensor("embedding", (11, 6), "decay"),
        Tensor("bias", (13,), "no_decay"),
    ]
)
STEPS = 20


class InPlace:
    """The update bound to flat buffers, as in the trainer."""

    def __init__(self, optimizer: Optimizer) -> None:
        parts = segments(optimizer, INDEX)
        model = compose(optimizer_graph(optimizer, parts))
        onnx.checker.check_model(model)
        self.session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        self.binding = self.session.io_binding()
        names = ("parameters", "gradients", *moments(optimizer))
        self.buffers = {name: np.zeros(INDEX.size, np.float32) for name in names}
        self.rate, self.step = np.zeros(1, np.float32), np.zeros(1, np.int64)
        inputs, outputs = (
            {each.name for each in some} for some in (self.session.get_inputs(), self.session.get_outputs())
        )
        for name, array in (("learning_rate", self.rate), ("step", self.step)):
            if name in inputs:
                self.binding.bind_input(name, "cpu", 0, array.dtype, (1,), array.ctypes.data)
        for i, part in enumerate(parts):
            for name, buffer in self.buffers.items():
                place = ("cpu", 0, np.float32, (part.count,), buffer.ctypes.data + 4 * part.start)
                if f"{name}.{i}" in inputs:
                    self.binding.bind_input(f"{name}.{i}", *place)
                if f"{name}.{i}.out" in outputs:
                    self.binding.bind_output(f"{name}.{i}.out", *place)

    def update(self, rate: float, step: int) -> None:
        self.rate[0], self.step[0] = rate, step
        self.session.run_with_iobinding(self.binding)

    def tensor(self, name: str, buffer: str = "parameters") -> Array:
        entry = INDEX[name]
        return self.buffers[buffer][entry.offset : entry.end].reshape(entry.tensor.shape)


def started(optimizer: Optimizer, scale: float) -> tuple[InPlace, list[dict[str, Array]]]:
    """Random parameters, and the gradients of all steps."""
    random, bound = np.random.default_rng(4), InPlace(optimizer)
    for entry in INDEX:
        bound.tensor(entry.name)[...] = random.normal(size=entry.tensor.shape)
    return bound, [
        {entry.name: (scale * random.normal(size=entry.tensor.shape)).astype(np.float32) for entry in INDEX}
        for _ in range(STEPS)
    ]


def padding_is_zero(bound: InPlace) -> bool:
    used = np.zeros(INDEX.size, bool)
    for entry in INDEX:
        used[entry.offset : entry.end] = True
    return not bound.buffers["parameters"][~used].any()


@pytest.mark.parametrize("scale", [1.0, 1e-4], ids=["gradients of 1", "gradients of 1e-4"])
def test_adafactor_is_torchs(scale: float) -> None:
    keys = {"beta2_decay": -0.7, "weight_decay": 0.1}
    optimizer = Adafactor(name="adafactor", lr=0.3, epsilon=(1e-7, 1e-3), clip_threshold=1.5, **keys)
    bound, gradients = started(optimizer, scale)
    theirs = {
        entry.name: torch.nn.Parameter(torch.from_numpy(bound.tensor(entry.name).copy()).double()) for entry in INDEX
    }
    matrices = {"params": [p for name, p in theirs.items() if name != "bias"]}
    groups = [matrices, {"params": [theirs["bias"]], "weight_decay": 0.0}]
    stepped = torch.optim.Adafactor(groups, lr=0.3, eps=(1e-7, 1e-3), d=1.5, **keys)
    for step, each in enumerate(gradients, 1):
        for name, values in each.items():
            bound.tensor(name, "gradients")[...] = values
            theirs[name].grad = torch.from_numpy(values).double()
        bound.update(0.3, step)
        stepped.step()
    for name, values in theirs.items():
        np.testing.assert_allclose(bound.tensor(name), values.detach().numpy(), rtol=2e-6, atol=2e-6, err_msg=name)
    assert padding_is_zero(bound)


def orthogonalized(update: Array) -> Array:
    x = update.reshape(update.shape[0], -1)
    tall = x.shape[0] > x.shape[1]
    x = (x.T if tall else x) / max(np.linalg.norm(x), 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.T if tall else x).reshape(update.shape)


@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_is_its_definition_and_adamw_for_the_rest(nesterov: bool) -> None:
    optimizer = Muon(
        name="muon", lr=0.02, weight_decay=0.1, nesterov=nesterov, adamw=["embedding"], adamw_lr=1e-3, epsilon=1e-8
    )
    bound, gradients = started(optimizer, 1.0)
    weights = {entry.name: bound.tensor(entry.name).astype(np.float64) for entry in INDEX}
    momenta = {name: np.zeros_like(values) for name, values in weights.items()}
    adamw = {name: torch.nn.Parameter(torch.from_numpy(weights[name].copy())) for name in ("embedding", "bias")}
    plain = {"params": [adamw["bias"]], "weight_decay": 0.0}
    stepped = torch.optim.AdamW(
        [{"params": [adamw["embedding"]]}, plain], lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
    )
    for step, each in enumerate(gradients, 1):
        for name, values in each.items():
            bound.tensor(name, "gradients")[...] = values
            g, w = values.astype(np.float64), weights[name]
            if name in adamw:
                adamw[name].grad = torch.from_numpy(g)
                continue
            momenta[name] = 0.95 * momenta[name] + 0.05 * g
            update = 0.05 * g + 0.95 * momenta[name] if nesterov else momenta[name]
            rows, columns = w.shape[0], w[0].size
            weights[name] = w - 0.02 * 0.1 * w - 0.02 * max(1, rows / columns) ** 0.5 * orthogonalized(update)
        bound.update(0.02, step)
        stepped.step()
    for name, values in weights.items():
        expected = adamw[name].detach().numpy() if name in adamw else values
        np.testing.assert_allclose(bound.tensor(name), expected, rtol=1e-5, atol=1e-5, err_msg=name)
    assert padding_is_zero(bound)
    assert not bound.tensor("wide", "moment_2").any()


def test_muon_is_near_torchs_which_computes_in_bf16() -> None:
    optimizer = Muon(name="muon", lr=0.02, weight_decay=0.1)
    bound, gradients = started(optimizer, 1.0)
    parameter = torch.nn.Parameter(torch.from_numpy(bound.tensor("wide").copy()))
    start, theirs = bound.tensor("wide").copy(), torch.optim.Muon([parameter], lr=0.02, weight_decay=0.1)
    for step, each in enumerate(gradients, 1):
        for name, values in each.items():
            bound.tensor(name, "gradients")[...] = values
        parameter.grad = torch.from_numpy(each["wide"])
        bound.update(0.02, step)
        theirs.step()
    found, expected = bound.tensor("wide") - start, parameter.detach().numpy() - start
    assert np.linalg.norm(found - expected) < 0.02 * np.linalg.norm(expected)


@needs_kernels
def test_muon_with_ortflows_kernels_has_the_same_parameters() -> None:
    rule = Muon(name="muon", lr=0.02, weight_decay=0.1)
    parts = segments(rule, INDEX)
    own = with_kernels(optimizer_graph(rule, parts, kernels=True))
    plain = optimizer_graph(rule, parts)
    outputs = [{value.name for value in model.graph.output} for model in (own, plain)]
    assert outputs[0] == outputs[1]
