"""Update rules of ONNX's operators against torch.optim in double precision, over 20 steps; Lion against its paper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

pytest.importorskip("torch.onnx", reason="PyTorch is not installed")
import numpy as np
import numpy.typing as npt
import torch

from ortflow.workflow.onnx_runtime import onnxruntime as ort
from ortflow.workflow.optim.graph import optimizer_graph
from ortflow.workflow.optim.segments import Segment
from ortflow.workflow.spec.optimizers import Adagrad, Lion, NAdam, Optimizer, RAdam, RmsProp, moments

Array = npt.NDArray[Any]
COUNT, STEPS = 640, 20
Torch = Callable[..., Any]

CASES: dict[str, tuple[Optimizer, Torch, dict[str, Any]]] = {
    "rmsprop": (RmsProp(name="rmsprop", lr=1e-2), torch.optim.RMSprop, {}),
    "rmsprop with all": (
        RmsProp(name="rmsprop", lr=1e-2, alpha=0.9, epsilon=1e-4, momentum=0.9, centered=True, weight_decay=0.1),
        torch.optim.RMSprop, {"alpha": 0.9, "eps": 1e-4, "momentum": 0.9, "centered": True, "weight_decay": 0.1},
    ),
    "adagrad": (Adagrad(name="adagrad", lr=1e-2), torch.optim.Adagrad, {}),
    "adagrad with all": (
        Adagrad(name="adagrad", lr=1e-2, epsilon=1e-5, initial_sum=0.1, weight_decay=0.1),
        torch.optim.Adagrad, {"eps": 1e-5, "initial_accumulator_value": 0.1, "weight_decay": 0.1},
    ),
    "nadam": (NAdam(name="nadam", lr=1e-2, weight_decay=0.1), torch.optim.NAdam, {"weight_decay": 0.1}),
    "nadam decoupled": (
        NAdam(name="nadam", lr=1e-2, betas=(0.8, 0.99), momentum_decay=0.1, weight_decay=0.1,
              decoupled_weight_decay=True),
        torch.optim.NAdam,
        {"betas": (0.8, 0.99), "momentum_decay": 0.1, "weight_decay": 0.1, "decoupled_weight_decay": True},
    ),
    "nadam without momentum decay": (
        NAdam(name="nadam", lr=1e-2, momentum_decay=0.0), torch.optim.NAdam, {"momentum_decay": 0.0}
    ),
    "radam": (RAdam(name="radam", lr=1e-2, weight_decay=0.1), torch.optim.RAdam, {"weight_decay": 0.1}),
    "radam decoupled": (
        RAdam(name="radam", lr=1e-2, betas=(0.8, 0.99), weight_decay=0.1, decoupled_weight_decay=True),
        torch.optim.RAdam, {"betas": (0.8, 0.99), "weight_decay": 0.1, "decoupled_weight_decay": True},
    ),
    "radam with a short memory": (
        RAdam(name="radam", lr=1e-2, betas=(0.9, 0.6)), torch.optim.RAdam, {"betas": (0.9, 0.6)}
    ),
}  # fmt: skip


def trained(optimizer: Optimizer, start: Array, gradients: Sequence[Array], first: int = 1) -> Array:
    """The parameters after the steps, in fp32; the first half of them has the optimizer's weight decay."""
    half = start.size // 2
    parts = [Segment(0, half, optimizer.weight_decay), Segment(half, start.size, 0.0)]
    session = ort.InferenceSession(optimizer_graph(optimizer, parts).SerializeToString())
    names = [output.name for output in session.get_outputs()]
    wanted = {given.name for given in session.get_inputs()}
    state = {name: np.zeros(start.size, np.float32) for name in moments(optimizer)}
    state["parameters"] = start.astype(np.float32)
    for step, gradient in enumerate(gradients, first):
        feeds: dict[str, Array] = {"learning_rate": np.full(1, optimizer.lr, np.float32), "step": np.full(1, step)}
        flat = {**state, "gradients": gradient.astype(np.float32)}
        feeds |= {f"{n}.{i}": a[p.start : p.stop] for i, p in enumerate(parts) for n, a in flat.items()}
        made = session.run(names, {name: array for name, array in feeds.items() if name in wanted})
        for name, array in zip(names, made, strict=True):
            buffer, number, _ = name.split(".")
            part = parts[int(number)]
            state[buffer][part.start : part.stop] = array
    return state["parameters"]


def drawn(seed: int = 0) -> tuple[Array, list[Array]]:
    random = np.random.default_rng(seed)
    start = random.normal(size=COUNT).astype(np.float32)
    scales = 10.0 ** random.uniform(-3, 0, COUNT)
    return start, [(random.normal(size=COUNT) * scales).astype(np.float32) for _ in range(STEPS)]


@pytest.mark.parametrize("case", CASES)
def test_twenty_steps_are_those_of_torch(case: str) -> None:
    optimizer, kind, keys = CASES[case]
    start, gradients = drawn()
    halves = [torch.nn.Parameter(torch.from_numpy(each).double()) for each in np.split(start, 2)]
    plain = {"params": [halves[1]], "weight_decay": 0.0}
    theirs = kind([{"params": [halves[0]]}, plain], lr=optimizer.lr, **keys)
    for gradient in gradients:
        for half, each in zip(halves, np.split(gradient, 2), strict=True):
            half.grad = torch.from_numpy(each).double()
        theirs.step()
    expected = torch.cat(halves).detach().numpy()
    assert np.abs(expected - start).mean() > 1e-3, "the parameters moved"
    np.testing.assert_allclose(trained(optimizer, start, gradients), expected, rtol=1e-6, atol=1e-6)


def test_lion_is_that_of_the_paper() -> None:
    optimizer, (start, gradients) = Lion(name="lion", lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1), drawn(1)
    w, m = start.astype(np.float64), np.zeros(COUNT)
    decay = np.repeat([0.1, 0.0], COUNT // 2)
    for g in gradients:
        w = w - optimizer.lr * (np.sign(0.9 * m + 0.1 * g) + decay * w)
        m = 0.95 * m + 0.05 * g
    np.testing.assert_allclose(trained(optimizer, start, gradients), w, rtol=1e-6, atol=1e-6)
    still = trained(optimizer, np.zeros(64), [np.zeros(64)])
    assert not still.any(), "without a gradient the sign is 0"


@pytest.mark.parametrize("step", [1_000, 200_000])
def test_the_running_product_of_nadam_needs_no_state(step: int) -> None:
    """One step with zero moments, far from the start, against the formula with a product of a million factors."""
    optimizer, (start, gradients) = NAdam(name="nadam", lr=1e-2, betas=(0.9999, 0.999), momentum_decay=1e-5), drawn(2)
    numbers = np.arange(1, step + 2, dtype=np.float64)
    mu = 0.9999 * (1 - 0.5 * 0.96 ** (numbers * 1e-5))
    product = np.exp(np.log(mu[:-1]).sum())
    g = gradients[0].astype(np.float64)
    root = np.sqrt(0.001 * g * g / (1 - 0.999**step)) + 1e-8
    change = g * (1 - mu[-2]) / (1 - product) + 0.0001 * g * mu[-1] / (1 - product * mu[-1])
    found = trained(optimizer, start, gradients[:1], step)
    np.testing.assert_allclose(found, start - 1e-2 * change / root, rtol=1e-6, atol=1e-6)
