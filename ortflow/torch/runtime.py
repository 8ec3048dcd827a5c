"""Where a module runs, and ONNX Runtime's sessions there. Called by `engine` and `plans`."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ortflow.workflow.device import Device
from ortflow.workflow.device.cpu import CpuDevice
from ortflow.workflow.errors import UserError
from ortflow.workflow.kernels.library import find_library
from ortflow.workflow.runtime_check.remember import runtime_here
from ortflow.workflow.sessions.session import Sessions
from ortflow.workflow.sessions.settings import Settings, merged

if TYPE_CHECKING:
    from ortflow.workflow.device.cuda import Captured

_LEGACY_STREAM = 1
"""CUDA's name of the default stream, on which PyTorch computes: ONNX Runtime takes 0 for "make a stream"."""
_WRONG = ("GatherToSliceFusion",)
"""Rewrites that break kept values: ONNX Runtime 1.19 makes a Gather by a Range, such as a GPT's positions, a Slice, and
drops the Range although it is an output, which then has no memory."""
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Precision -> the type that autocast computes in."""
_PRECISIONS = {kind: precision for precision, kind in HALF.items()}


@dataclass(frozen=True)
class Place:
    """A device, its stream, and the precision that PyTorch's modes ask for."""

    kind: str = "cpu"
    index: int = 0
    stream: int = 0
    precision: str = "fp32"

    @property
    def device(self) -> torch.device:
        """As PyTorch names it."""
        return torch.device("cpu") if self.kind == "cpu" else torch.device(self.kind, self.index)


def place_of(tensors: Iterable[torch.Tensor]) -> Place:
    """Where the module of these tensors runs now; other devices than CPU and CUDA are refused later."""
    device = next((tensor.device for tensor in tensors), torch.device("cpu"))
    if device.type != "cuda":
        return Place()
    precision = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "fp32"
    if torch.is_autocast_enabled("cuda"):
        kind = torch.get_autocast_dtype("cuda")
        if kind not in _PRECISIONS:
            raise UserError(f"torch.autocast is on for {kind}", fix="use torch.bfloat16 or torch.float16")
        precision = _PRECISIONS[kind]
    index = torch.cuda.current_device() if device.index is None else device.index
    return Place("cuda", index, torch.cuda.current_stream(index).cuda_stream, precision)


@functools.cache
def sessions_for(place: Place, threads: int, log_level: str = "error", *, own_stream: bool = False) -> Sessions:
    """Opens sessions at a place; on a CPU with so many threads, on a GPU on PyTorch's stream or one of their own."""
    settings = merged([runtime_here().outcome.settings, Settings(_WRONG)])
    if place.kind == "cpu":
        return Sessions(CpuDevice(), threads, log_level, find_library().path, settings)
    return Sessions(_gpu(place, own_stream), threads, log_level, settings=settings)


def _gpu(place: Place, own_stream: bool) -> Device:
    from ortflow.workflow.device.choice import cuda_runtime
    from ortflow.workflow.device.cuda import CudaDevice

    cuda = cuda_runtime()
    # CUDA cannot capture its default stream.
    stream = None if own_stream else place.stream or _LEGACY_STREAM
    gpu = cuda.describe(place.index)
    return CudaDevice(cuda, gpu, precision=place.precision, stream=stream, captured=_captured_on(place.index))


@functools.cache
def _captured_on(index: int) -> weakref.WeakSet[Captured]:
    """The captured work on a GPU, whatever its stream and precision."""
    # All sessions of a process allocate from one arena. A captured graph of any of them has values, in between, where
    # a session that is opened later has its constants: each opening must discard all of them.
    return weakref.WeakSet()
