"""What a module must not have to be run as a graph: each as one sentence. Called by `engine` and `tracing`."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ortflow.exporter.stops import shadowed
from ortflow.workflow.errors import UserError


class FunctionCalled(UserError):
    """Forward calls a custom `torch.autograd.Function`."""


@contextlib.contextmanager
def functions_refused() -> Iterator[None]:
    """Raise FunctionCalled for a custom `torch.autograd.Function` inside the block."""
    # PyTorch's exporter would lose its backward.
    apply = inspect.getattr_static(torch.autograd.Function, "apply")
    called: list[str] = []

    def applied(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__.split(".")[0] == "torch":
            return apply.__get__(None, cls)(*args, **kwargs)
        called.append(cls.__qualname__)
        raise RuntimeError(cls.__qualname__)

    with shadowed(torch.autograd.Function, "apply", classmethod(applied)):
        try:
            yield
        except UserError:
            if not called:
                raise
            raise FunctionCalled(
                f"forward calls {called[0]}, a torch.autograd.Function, whose backward a graph would lose",
                fix='call it in a module that has submodules, or pass fallback="submodule", which leaves the module to'
                " PyTorch",
            ) from None


@contextlib.contextmanager
def generators_refused() -> Iterator[None]:
    """Refuse that the block draws from the generators of Python or NumPy: a graph would repeat the first number."""
    import random

    import numpy as np

    def state() -> tuple[Any, Any]:
        kind, keys, *rest = [*np.random.get_state()]
        return random.getstate(), (kind, np.asarray(keys).tobytes(), *rest)

    before = state()
    yield
    for name, old, new in zip(("random", "numpy.random"), before, state(), strict=True):
        if old != new:
            raise UserError(
                f"forward draws numbers from Python's module {name}, and a graph would repeat the first ones",
                fix="draw them with torch.rand, or before the call and pass them as tensors",
            )


def check_constants(shapes: Sequence[str]) -> None:
    """Raise UserError if a call would need gradients of tensors, of these shapes, that graphs have as constants."""
    if shapes:
        raise UserError(
            f"forward reads a tensor of shape {shapes[0]} that requires a gradient and is neither a parameter of the"
            " module nor an argument: a graph would not compute its gradient",
            fix="make it a parameter (register_parameter, nn.ParameterList), pass it as an argument, or detach it",
        )


def check_module(module: torch.nn.Module) -> None:
    """Raise UserError for a module that no structure of its inputs can be exported for."""
    for name, parameter in (*module.named_parameters(), *module.named_buffers()):
        if parameter.device.type == "meta":
            raise UserError(f"{name!r} has no values (meta device)", fix="load the weights first")
        if hasattr(parameter, "ds_status"):
            # DeepSpeed 0.19.8 gathers parameters in the forward of the submodule that has them, which a graph does not
            # call, and frees those of a leaf module before its backward pass where its inputs have no gradient.
            raise UserError(f"{name!r} is divided among the ranks by DeepSpeed's ZeRO stage 3",
                            fix="use ZeRO stage 1 or 2, or FSDP (fully_shard)")  # fmt: skip
        if parameter.is_floating_point() and parameter.dtype != torch.float32:
            kind = str(parameter.dtype).removeprefix("torch.")
            raise UserError(
                f"{name!r} is {kind}, and ORTModule keeps parameters and buffers in float32",
                fix="call module.float(); torch.autocast computes in half precision",
            )
    for name, part in module.named_modules():
        if isinstance(part, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and part.sparse:
            raise UserError(f"{name!r} has sparse gradients (sparse=True), and a graph has dense ones",
                            fix="set sparse=False")  # fmt: skip
        if isinstance(part, torch.nn.SyncBatchNorm):
            raise UserError(f"{name!r} is a SyncBatchNorm, whose statistics run over ranks inside forward",
                            fix="leave torch.nn.BatchNorm as it is")  # fmt: skip
        if part._backward_hooks or part._backward_pre_hooks:
            raise UserError(f"{name or type(part).__name__!r} has a backward hook, which a graph would not call",
                            fix="remove it, or hook the ORTModule or parameters")  # fmt: skip


def check_call(module: torch.nn.Module, inputs: Sequence[torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise UserError for a call on devices or in a mode that no graph can be made for."""
    devices = {tensor.device: name for name, tensor in tensors.items()}
    devices |= {tensor.device: f"argument {place}" for place, tensor in enumerate(inputs) if tensor.ndim}
    if len(devices) > 1:
        places = " and ".join(f"{name!r} on {device}" for device, name in devices.items())
        raise UserError(
            f"{type(module).__name__} is called with {places}", fix="put the module and its inputs on one device"
        )
    kind = next((device.type for device in devices), "cpu")
    if kind not in ("cpu", "cuda"):
        raise UserError(f"the module is on {kind}, and ORTModule runs on cpu and cuda")
    if kind == "cpu" and torch.is_autocast_enabled("cpu"):
        raise UserError(
            "torch.autocast is on, and there are no half-precision kernels for CPUs",
            fix="leave autocast out on the CPU: ORTModule computes in float32 there",
        )
