"""cuBLAS by ctypes: scaling and adding buffers of fp32. Products are those of cuBLASLt (`ortflow.workflow.cuda.lt`)."""

from __future__ import annotations

import ctypes
from typing import Any

from ortflow.workflow.device.cudart import CudaError
from ortflow.workflow.device.libraries import major, preload


class Blas:
    """The routines of cuBLAS that are needed, on a stream. Each raises CudaError if it fails."""

    def __init__(self, library: Any, stream: int) -> None:
        self._blas, self._handle = library, ctypes.c_void_p()
        self._call("cublasCreate_v2", ctypes.byref(self._handle))
        self._call("cublasSetStream_v2", self._handle, ctypes.c_void_p(stream))

    def _call(self, name: str, *arguments: Any) -> None:
        code = int(getattr(self._blas, name)(*arguments))
        if code:
            raise CudaError(code, f"{name} failed with status {code}")

    def scale(self, target: int, factor: float, count: int) -> None:
        """Queue target *= factor of so many fp32 elements."""
        self._call(
            # The functions with _64 came with CUDA 12: a flat buffer may have more than 2^31 elements.
            "cublasSscal_v2_64", self._handle, ctypes.c_int64(count), ctypes.byref(ctypes.c_float(factor)),
            ctypes.c_void_p(target), ctypes.c_int64(1),
        )  # fmt: skip

    def add(self, target: int, source: int, count: int) -> None:
        """Queue target += source of so many fp32 elements."""
        alpha, step = ctypes.c_float(1.0), ctypes.c_int64(1)
        self._call(
            "cublasSaxpy_v2_64", self._handle, ctypes.c_int64(count), ctypes.byref(alpha),
            ctypes.c_void_p(source), step, ctypes.c_void_p(target), step,
        )  # fmt: skip


def blas(stream: int) -> Blas:
    """cuBLAS on a stream of this thread's device."""
    preload()
    return Blas(ctypes.CDLL(f"libcublas.so.{major()}"), stream)
