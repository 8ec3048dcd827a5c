"""Outputs of a PyTorch module, and gradients of a fixed sum, for the comparison with its exported file.

Called by `ortflow.exporter.file_check`. Works on the module itself: a copy loses the hooks of its parameters. What a
call changes is restored: values, modes, attributes, the random state.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ortflow.exporter.random import NotFixed, fixed_in_pytorch
from ortflow.exporter.rounding import other_rounding
from ortflow.exporter.trace import same_attributes, without_caches

if TYPE_CHECKING:
    import torch


class NotCompared(Exception):
    """Something could not be compared; the message says why."""


class NotFinite(NotCompared):
    """The module's own results are infinite or NaN."""


@dataclass(frozen=True)
class Result:
    """Outputs in order, gradients by the parameter's name, if there are any, and buffers after the call."""

    outputs: list[np.ndarray]
    gradients: dict[str, np.ndarray]
    buffers: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def is_finite(self) -> bool:
        """Whether there is neither NaN nor infinity in outputs and gradients."""
        return all(bool(np.isfinite(value).all()) for value in [*self.outputs, *self.gradients.values()])


@dataclass(frozen=True)
class Call:
    """A module, and the arguments of its call."""

    module: torch.nn.Module
    inputs: Any
    """Positional and keyword arguments."""


@contextlib.contextmanager
def borrowed(module: torch.nn.Module) -> Iterator[None]:
    """Let the block change values, modes and attributes of a module; afterwards they are as before.

    The storage of parameters and buffers is replaced, not written to.
    """
    tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}.values()
    storages = [(tensor, tensor.data) for tensor in tensors]
    for tensor, data in storages:
        tensor.data = data.clone()
    try:
        with same_attributes(module):
            yield
    finally:
        for tensor, data in storages:
            tensor.data = data


def call_of(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], noise: float) -> Call:
    """A call with Gaussian noise on the inputs, relative to each tensor's spread. Sets the module's parameters, too.

    Called inside `borrowed`; the parameters have their own values then.
    """
    import torch
    from torch.utils import _pytree as pytree

    generator = torch.Generator().manual_seed(7)

    def moved(tensor: Any) -> Any:
        if not noise or not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            return tensor
        spread = tensor.std() if tensor.numel() > 1 else tensor.abs().mean()
        drawn = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        return tensor + drawn * noise * (spread if spread > 0 else 1.0)

    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(moved(parameter.detach()))
        return Call(module, pytree.tree_map(moved, (args, kwargs)))


@contextlib.contextmanager
def doubled(call: Call) -> Iterator[Call]:
    """The same in double precision, inside the block."""
    import torch
    from torch.utils import _pytree as pytree

    def raised(value: Any) -> Any:
        single = isinstance(value, torch.Tensor) and value.dtype == torch.float32
        return value.double() if single else value

    with borrowed(call.module):
        for tensor in (*call.module.parameters(), *call.module.buffers()):
            if tensor.dtype == torch.float32:
                tensor.data = tensor.data.double()
        yield Call(call.module, pytree.tree_map(raised, call.inputs))


def compute(
    call: Call, weights: Sequence[np.ndarray | None] | None, *, times: int = 1, rounding: int | None = None
) -> tuple[Result, list[np.ndarray | None]]:
    """Outputs, gradients of the sum of outputs times `weights`, and the weights, which are drawn if not given.

    An output without a gradient has no weights. `times`: the result is that of the last of so many calls in a row.
    `rounding`: the seed of another rounding.
    Raises NotCompared if the module does not run.
    """
    import torch
    from torch.utils import _pytree as pytree

    args, kwargs = call.inputs
    kind = next((p.dtype for p in call.module.parameters()), torch.float32)
    try:
        with (
            torch.random.fork_rng(devices=[]),
            warnings.catch_warnings(),
            fixed_in_pytorch(),
            contextlib.nullcontext() if rounding is None else other_rounding(rounding),
            torch.enable_grad(),
            borrowed(call.module),
            without_caches(call.module),
            by_default(kind),
        ):
            warnings.simplefilter("ignore")
            for _ in range(times):
                returned = call.module(*args, **kwargs)
            outputs = [leaf for leaf in pytree.tree_leaves(returned) if isinstance(leaf, torch.Tensor)]
            if weights is None:
                weights = _drawn(outputs)
            total = torch.zeros(())
            for output, weight in zip(outputs, weights, strict=True):
                if weight is not None:
                    total = total + (output * torch.from_numpy(weight).to(output.dtype)).sum()
            parameters = {name: p for name, p in call.module.named_parameters() if p.requires_grad}
            gradients: Sequence[Any] = ()
            if total.requires_grad and parameters:
                gradients = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
            buffers = {name: b.detach().numpy().copy() for name, b in call.module.named_buffers()}
            values = [output.detach().numpy().copy() for output in outputs]
    except NotFixed as error:
        raise NotCompared(f"{error} is random") from None
    except Exception as error:  # noqa: BLE001 - whatever the user's forward raises
        raise NotCompared(f"the module does not run on the example inputs in training mode ({_line(error)})") from None
    gradients_by_name = {
        n: g.detach().to_dense().numpy() for n, g in zip(parameters, gradients, strict=False) if g is not None
    }
    return Result(values, gradients_by_name, buffers), list(weights)


@contextlib.contextmanager
def by_default(dtype: torch.dtype) -> Iterator[None]:
    """The precision of tensors that a module makes without saying which, inside the block."""
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _drawn(outputs: Sequence[torch.Tensor]) -> list[np.ndarray | None]:
    """Weights for a sum in which each differentiable output counts equally."""
    import torch

    generator = np.random.default_rng(7)
    return [
        np.asarray(generator.standard_normal(tuple(o.shape)) / np.sqrt(max(o.numel(), 1)), np.float32)
        if o.requires_grad and o.dtype == torch.float32
        else None
        for o in outputs
    ]


def tensors_of(call: Call, forward: Any) -> list[np.ndarray]:
    """The tensors among the inputs, in the order of `forward`'s arguments, as an exported file takes them."""
    import inspect

    import torch
    from torch.utils import _pytree as pytree

    args, kwargs = call.inputs
    bound = inspect.signature(forward).bind(*args, **kwargs).arguments
    return [leaf.detach().numpy() for leaf in pytree.tree_leaves(bound) if isinstance(leaf, torch.Tensor)]


@contextlib.contextmanager
def with_running_statistics(module: torch.nn.Module) -> Iterator[None]:
    """Switch every BatchNormalization to evaluation mode inside the block, as in an exported file."""
    import torch

    parts = [p for p in module.modules() if isinstance(p, torch.nn.modules.batchnorm._BatchNorm) and p.training]
    for part in parts:
        part.training = False
    try:
        yield
    finally:
        for part in parts:
            part.training = True


@contextlib.contextmanager
def in_evaluation(module: torch.nn.Module) -> Iterator[None]:
    """The module in evaluation mode, inside the block."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, training in modes.items():
            part.training = training


def _line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:160]
