"""One update of all tensors of a parameter group: by the compiled library, else by PyTorch's multi-tensor operators."""

from __future__ import annotations

import ctypes
import enum
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ortflow.workflow.errors import UserError
from ortflow.workflow.kernels.library import find_library


class Rule(enum.IntEnum):
    """The rules of `multi_tensor.c`."""

    ADAM = 0
    LAMB = 1
    SGD = 2


@dataclass(frozen=True)
class Options:
    """Numbers of a parameter group; SGD's momentum is `beta_1`, and `mode` is whether it is Nesterov's."""

    rate: float
    beta_1: float
    beta_2: float
    epsilon: float
    decay: float
    mode: int = 0
    correct: bool = True


@dataclass
class Tensors:
    """Parameters that have a gradient, their gradients, moments and step numbers; `seconds` is empty for SGD."""

    parameters: list[torch.Tensor]
    gradients: list[torch.Tensor]
    firsts: list[torch.Tensor]
    seconds: list[torch.Tensor]
    steps: list[int]

    def part(self, mask: Sequence[bool]) -> Tensors:
        """Those that are chosen."""

        def some(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            return [tensor for tensor, yes in zip(tensors, mask, strict=False) if yes]

        steps = [step for step, yes in zip(self.steps, mask, strict=True) if yes]
        return Tensors(some(self.parameters), some(self.gradients), some(self.firsts), some(self.seconds), steps)


_NUMBERS = ("rate", "beta_1", "beta_2", "epsilon", "decay")
_CHOICES = ("mode", "correct")


class _Options(ctypes.Structure):
    _fields_ = (*((name, ctypes.c_double) for name in _NUMBERS), *((name, ctypes.c_int64) for name in _CHOICES))


@functools.cache
def _library() -> Callable[..., int] | None:
    path = find_library().path
    return None if path is None else ctypes.CDLL(str(path)).ortflow_step


def update(rule: Rule, tensors: Tensors, options: Options, otherwise: Callable[[Tensors, Options], None]) -> None:
    """Update the tensors in place: fp32 tensors in the CPU's memory by the library, others by `otherwise`.

    Raises UserError for a sparse gradient.
    """
    for gradient in tensors.gradients:
        if gradient.is_sparse:
            raise UserError(
                "a gradient is sparse", where="ortflow.torch.optim", fix="use torch.optim.SparseAdam for it"
            )
    function = _library()
    groups = zip(tensors.parameters, tensors.gradients, strict=True)
    supported = [function is not None and _is_ours(w) and _is_ours(g) for w, g in groups]
    if function is not None and any(supported):
        supported_tensors = tensors if all(supported) else tensors.part(supported)
        _call(function, rule, supported_tensors, options)
    if not all(supported):
        otherwise(
            tensors if not any(supported) else tensors.part([not is_supported for is_supported in supported]), options
        )


def _dtensor() -> Any:
    try:
        from torch.distributed.tensor import DTensor
    except ImportError:
        return type(None)
    return DTensor


_DTENSOR = _dtensor()
"""A sharded tensor, which has no memory of its own."""


def _is_ours(tensor: torch.Tensor) -> bool:
    is_plain = tensor.dtype == torch.float32 and tensor.device.type == "cpu" and tensor.is_contiguous()
    return is_plain and not isinstance(tensor, _DTENSOR)


def _call(function: Callable[..., int], rule: Rule, tensors: Tensors, options: Options) -> None:
    count = len(tensors.parameters)
    table = np.zeros((count, 6), np.int64)
    table[:, 0] = [tensor.data_ptr() for tensor in tensors.parameters]
    table[:, 1] = [tensor.data_ptr() for tensor in tensors.gradients]
    if tensors.firsts:
        table[:, 2] = [tensor.data_ptr() for tensor in tensors.firsts]
    if tensors.seconds:
        table[:, 3] = [tensor.data_ptr() for tensor in tensors.seconds]
    table[:, 4] = [tensor.numel() for tensor in tensors.parameters]
    table[:, 5] = tensors.steps
    numbers = _Options(*(getattr(options, name) for name in (*_NUMBERS, *_CHOICES)))
    threads = ctypes.c_int64(torch.get_num_threads())
    pointer = ctypes.c_void_p(table.ctypes.data)
    if function(ctypes.c_int64(rule), pointer, ctypes.c_int64(count), ctypes.byref(numbers), threads):
        raise MemoryError("no memory for an optimizer step")
    # Autograd notices a change between the forward and the backward pass by the versions of tensors.
    for tensor in (*tensors.parameters, *tensors.firsts, *tensors.seconds):
        torch.autograd.graph.increment_version(tensor)
