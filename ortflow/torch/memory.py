"""Tensors over memory that is not PyTorch's to free: values of ONNX Runtime, and blocks that are given out again."""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

KINDS: dict[int, tuple[torch.dtype, str]] = {
    1: (torch.float32, "<f4"),
    2: (torch.uint8, "|u1"),
    3: (torch.int8, "|i1"),
    5: (torch.int16, "<i2"),
    6: (torch.int32, "<i4"),
    7: (torch.int64, "<i8"),
    9: (torch.bool, "|b1"),
    10: (torch.float16, "<f2"),
    11: (torch.float64, "<f8"),
    16: (torch.bfloat16, "<i2"),
}
"""Element type as ONNX counts them -> PyTorch's, and that of the array interface; NumPy has no bfloat16."""
_TEXTS = dict(KINDS.values())
ALIGNMENT = 256
"""Bytes between the starts of a block's tensors, as CUDA's own allocations: kernels read vectors."""


class Addressed(Protocol):
    """Memory with an address."""

    def data_ptr(self) -> int:
        """The address."""


class _Memory:
    """Memory for NumPy (CPU) and PyTorch (CUDA): both keep this alive, and this the memory."""

    def __init__(self, owner: Addressed, shape: Sequence[int], kind: str, interface: str) -> None:
        self._owner = owner
        described = {"data": (owner.data_ptr(), False), "shape": tuple(shape), "typestr": kind, "version": 3}
        setattr(self, interface, described)


def _tensor(owner: Addressed, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> tuple[Any, _Memory]:
    if device.type == "cpu":
        memory = _Memory(owner, shape, _TEXTS[dtype], "__array_interface__")
        tensor = torch.from_numpy(np.asarray(memory))
    else:
        memory = _Memory(owner, shape, _TEXTS[dtype], "__cuda_array_interface__")
        tensor = torch.as_tensor(memory, device=device)
    return (tensor.view(dtype) if dtype is torch.bfloat16 else tensor), memory


def tensor_over(value: Any, device: torch.device) -> torch.Tensor:
    """A tensor over the memory of a value of ONNX Runtime's."""
    shape, dtype = value.shape(), KINDS[value.element_type()][0]
    if 0 in shape:
        return torch.empty(shape, dtype=dtype, device=device)
    tensor: torch.Tensor = _tensor(value, shape, dtype, device)[0]
    return tensor


class Block:
    """Memory of several tensors that is given out again when nobody has any of them.

    Parameters
    ----------
    shapes
        Of the tensors.
    dtype
        Element type of all.
    device
        Where the memory is.
    """

    def __init__(self, shapes: Sequence[torch.Size], dtype: torch.dtype, device: torch.device) -> None:
        self.shapes = tuple(shapes)
        step = ALIGNMENT // dtype.itemsize
        sizes = [-(-math.prod(shape) // step) * step for shape in shapes]
        *self._starts, size = itertools.accumulate(sizes, initial=0)
        self._flat = torch.empty(size or step, dtype=dtype, device=device)
        self._lent: weakref.ref[_Memory] | None = None

    @property
    def device(self) -> torch.device:
        """Where the memory is."""
        return self._flat.device

    @functools.cached_property
    def tensors(self) -> list[torch.Tensor]:
        """For the owner of the block."""
        return self._divided(self._flat)

    @property
    def in_use(self) -> bool:
        """Whether somebody still has a tensor that was lent, a view of one, or a value that autograd saved."""
        return self._lent is not None and self._lent() is not None

    def lend(self) -> list[torch.Tensor]:
        """The tensors, in a storage of their own that keeps the memory alive. Only when the block is not in use."""
        flat, memory = _tensor(self._flat, self._flat.shape, self._flat.dtype, self._flat.device)
        self._lent = weakref.ref(memory)
        return self._divided(flat)

    def _divided(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [
            flat[start : start + math.prod(shape)].view(shape)
            for start, shape in zip(self._starts, self.shapes, strict=True)
        ]
