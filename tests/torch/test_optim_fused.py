"""`ortflow.torch.optim` against torch.optim: every element over 20 steps, states, groups, errors."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
import numpy as np
import torch

from ortflow.torch.optim import SGD, AdamWMode, FP16_Optimizer, FusedAdam, Lamb
from ortflow.torch.optim.multi_tensor import _library
from ortflow.workflow.errors import UserError

STEPS = 20
SEVERAL_TASKS = 40000
Build = Callable[[Any], torch.optim.Optimizer]
BOTH = {"lr": 0.02, "betas": (0.85, 0.98), "eps": 1e-7, "weight_decay": 0.1}


def tensors(seed: int, dtype: torch.dtype) -> list[torch.nn.Parameter]:
    """Random sizes: none, one, less than a vector, several tasks; and one that is not contiguous."""
    random = np.random.default_rng(seed)
    shapes = [(), (0,), (3,), (67, 31), (SEVERAL_TASKS,), *(tuple(random.integers(1, 40, 2)) for _ in range(3))]
    values = [drawn(random, shape).to(dtype, copy=True) for shape in shapes]
    values.append(drawn(random, (30, 20)).to(dtype, copy=True).T)
    return [torch.nn.Parameter(value) for value in values]


def drawn(random: np.random.Generator, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(np.asarray(random.normal(size=shape)))


def trained(build: Build, dtype: torch.dtype, seed: int = 0, steps: int = STEPS) -> list[torch.nn.Parameter]:
    """The parameters after some steps; one has no gradient in every third step."""
    parameters = tensors(seed, dtype)
    optimizer = build(groups(parameters))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    for step in range(steps):
        follow(parameters, step, seed)
        optimizer.step()
        schedule.step()
    return parameters


def groups(parameters: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": parameters[::2]}, {"params": parameters[1::2], "weight_decay": 0.0, "lr": 0.005}]


def follow(parameters: list[torch.nn.Parameter], step: int, seed: int) -> None:
    found = gradients(seed, step, tuple([tuple(parameter.shape) for parameter in parameters]))
    for place, (parameter, gradient) in enumerate(zip(parameters, found, strict=True)):
        left_out = step % 3 == 1 and place == 3
        parameter.grad = None if left_out else gradient.to(parameter.dtype, copy=True)


@functools.cache
def gradients(seed: int, step: int, shapes: tuple[tuple[int, ...], ...]) -> list[torch.Tensor]:
    random = np.random.default_rng((seed, step))
    return [drawn(random, shape) for shape in shapes]


class Plain(torch.optim.Optimizer):
    """A rule with Adam's moments, one tensor at a time."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                state["step"] += 1
                b1, b2 = group["betas"]
                state["m"].mul_(b1).add_(p.grad, alpha=1 - b1)
                state["v"].mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
                self.change(group, p, state["m"], state["v"], 1 - b1 ** state["step"], 1 - b2 ** state["step"])

    def change(
        self, group: dict[str, Any], p: torch.Tensor, m: torch.Tensor, v: torch.Tensor, first: float, second: float
    ) -> None:
        raise NotImplementedError


class TransformersAdamW(Plain):
    """The rule of transformers.AdamW, which transformers 5 has no longer."""

    def __init__(self, params: Any, *, correct: bool = True) -> None:
        self.correct = correct
        super().__init__(params, dict(BOTH))

    def change(
        self, group: dict[str, Any], p: torch.Tensor, m: torch.Tensor, v: torch.Tensor, first: float, second: float
    ) -> None:
        rate = group["lr"] * (second**0.5 / first if self.correct else 1)
        p.addcdiv_(m, v.sqrt().add_(group["eps"]), value=-rate)
        p.add_(p, alpha=-group["lr"] * group["weight_decay"])


class PlainLamb(Plain):
    """LAMB's algorithm 2."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, dict(BOTH))

    def change(
        self, group: dict[str, Any], p: torch.Tensor, m: torch.Tensor, v: torch.Tensor, first: float, second: float
    ) -> None:
        u = m / first / ((v / second).sqrt() + group["eps"]) + group["weight_decay"] * p
        of_p, of_u = float(p.norm()), float(u.norm())
        p.sub_(u, alpha=group["lr"] * (of_p / of_u if of_p and of_u else 1))


RULES: dict[str, tuple[Build, Build]] = {
    "L2": (
        lambda p: FusedAdam(p, adam_w_mode=AdamWMode.ADAM_L2_REGULARIZATION, **BOTH),
        lambda p: torch.optim.Adam(p, **BOTH),
    ),
    "AdamW": (lambda p: FusedAdam(p, adam_w_mode=2, **BOTH), lambda p: torch.optim.AdamW(p, **BOTH)),
    "transformers": (lambda p: FusedAdam(p, **BOTH), TransformersAdamW),
    "uncorrected": (
        lambda p: FusedAdam(p, bias_correction=False, **BOTH),
        lambda p: TransformersAdamW(p, correct=False),
    ),
    "LAMB": (lambda p: Lamb(p, **BOTH), PlainLamb),
    "SGD": (lambda p: SGD(p, 0.02, weight_decay=0.1), lambda p: torch.optim.SGD(p, 0.02, weight_decay=0.1)),
    "momentum": (
        lambda p: SGD(p, 0.02, momentum=0.9, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, 0.02, momentum=0.9, weight_decay=0.1),
    ),
    "Nesterov": (
        lambda p: SGD(p, 0.02, momentum=0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, 0.02, momentum=0.9, nesterov=True),
    ),
}


@functools.cache
def expected(rule: str) -> list[torch.nn.Parameter]:
    return trained(RULES[rule][1], torch.float64)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["library", "operators"])
def test_twenty_steps(rule: str, dtype: torch.dtype) -> None:
    """Fp32 is the library's; double precision is left to PyTorch's operators. Both against double precision."""
    for found, wanted in zip(trained(RULES[rule][0], dtype), expected(rule), strict=True):
        rtol, atol = (2e-5, 2e-6) if dtype == torch.float32 else (1e-9, 1e-12)
        torch.testing.assert_close(found.double(), wanted, rtol=rtol, atol=atol)


def test_the_library_is_used_where_it_is() -> None:
    assert _library() is not None


def test_the_threads_make_no_difference() -> None:
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append([trained(RULES[rule][0], torch.float32, steps=3) for rule in ("AdamW", "LAMB", "momentum")])
    finally:
        torch.set_num_threads(threads)
    for one, other in zip(*found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("to_torch", [True, False], ids=["to torch", "from torch"])
def test_states_are_exchanged_with_torch(to_torch: bool) -> None:
    """Half of the steps with one optimizer, the other half with the other."""
    builds = RULES["AdamW"] if to_torch else RULES["AdamW"][::-1]
    parameters = tensors(1, torch.float32)
    first = builds[0](groups(parameters))
    for step in range(10):
        follow(parameters, step, 1)
        first.step()
    second = builds[1](groups(parameters))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    reference = tensors(1, torch.float32)
    whole = builds[1](groups(reference))
    for step in range(20):
        follow(reference, step, 1)
        whole.step()
        if step >= 10:
            follow(parameters, step, 1)
            second.step()
    for found, wanted in zip(parameters, reference, strict=True):
        torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-6)


def test_a_resumed_state_is_bit_identical() -> None:
    for rule in ("AdamW", "LAMB", "Nesterov"):
        build, parameters = RULES[rule][0], tensors(2, torch.float32)
        optimizer = build(groups(parameters))
        for step in range(6):
            follow(parameters, step, 2)
            optimizer.step()
            if step == 2:
                saved = copy.deepcopy((optimizer.state_dict(), [p.detach() for p in parameters]))
        resumed = [torch.nn.Parameter(value) for value in saved[1]]
        optimizer = build(groups(resumed))
        optimizer.load_state_dict(saved[0])
        for step in range(3, 6):
            follow(resumed, step, 2)
            optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(parameters, resumed, strict=True))


def test_autograd_notices_a_step_between_forward_and_backward() -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    loss = (parameter * parameter).sum()
    parameter.grad = torch.ones(4)
    FusedAdam([parameter]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_closures_and_gradients() -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    for build in (FusedAdam, Lamb, SGD):
        optimizer = build([parameter], lr=torch.tensor(0.1))

        def closure(optimizer: torch.optim.Optimizer = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = parameter.square().sum()
            loss.backward()
            return loss

        before = parameter.detach().clone()
        assert float(optimizer.step(closure).detach()) == float(before.square().sum())
        assert not torch.equal(before, parameter)
    optimizer.zero_grad()
    assert parameter.grad is None


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda p: FusedAdam(p, adam_w_mode=3), "adam_w_mode is 3; use an AdamWMode"),
        (lambda p: FusedAdam(p, betas=(0.9, 1.0)), r"betas is \(0.9, 1.0\)"),
        (lambda p: Lamb(p, lr=-1), "lr is -1; it must not be negative"),
        (lambda p: SGD(p, nesterov=True), "nesterov needs momentum"),
        (lambda p: FP16_Optimizer(p), "it was given a list"),
        (lambda p: FP16_Optimizer(SGD(p), verbose=True), "for which verbose would be, is not supported"),
    ],
)
def test_errors(build: Build, words: str) -> None:
    with pytest.raises(UserError, match=words):
        build([torch.nn.Parameter(torch.ones(2))])


def test_a_sparse_gradient_is_refused() -> None:
    table = torch.nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(UserError, match="a gradient is sparse"):
        FusedAdam(table.parameters()).step()


def test_another_state_is_refused() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(UserError, match="has `amsgrad` or `maximize`"):
        FusedAdam([parameter]).load_state_dict(torch.optim.AdamW([parameter], amsgrad=True).state_dict())


def test_fp16_optimizer_returns_the_optimizer() -> None:
    optimizer = SGD([torch.nn.Parameter(torch.ones(2))])
    assert FP16_Optimizer(optimizer) is optimizer
