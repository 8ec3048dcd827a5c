"""CUDA's runtime and cuBLAS played on host memory: what `cudart` calls, by the same names and arguments."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np

from ortflow.workflow.device.cuda import CudaDevice
from ortflow.workflow.device.cudart import Runtime

GIB = 1 << 30


class FakeCuda:
    """`failing` maps names of functions to the errors that they return."""

    def __init__(
        self, gpus: int = 1, *, driver: int = 13000, claimed: int = 0, failing: Mapping[str, int] | None = None
    ) -> None:
        self.gpus, self.driver, self.claimed, self.failing = gpus, driver, claimed, dict(failing or {})
        self.blocks: dict[int, Any] = {}
        self.used: list[int] = []

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the fake has no {name}")

    def _code(self, name: str) -> int:
        return self.failing.get(name, 0)

    def cudaGetLastError(self) -> int:  # noqa: N802
        return 0

    @property
    def cudaGetErrorString(self) -> Any:  # noqa: N802
        class Words:
            restype: Any = None

            def __call__(self, code: int) -> bytes:
                return b"out of memory" if code == 2 else f"error {code}".encode()

        return Words()

    def _give(self, name: str, place: Any, value: int) -> int:
        place._obj.value = value
        return self._code(name)

    def cudaGetDeviceCount(self, place: Any) -> int:  # noqa: N802
        return self._give("cudaGetDeviceCount", place, self.gpus)

    def cudaDriverGetVersion(self, place: Any) -> int:  # noqa: N802
        return self._give("cudaDriverGetVersion", place, self.driver)

    def cudaRuntimeGetVersion(self, place: Any) -> int:  # noqa: N802
        return self._give("cudaRuntimeGetVersion", place, 13000)

    def cudaDeviceGetAttribute(self, place: Any, attribute: int, index: int) -> int:  # noqa: N802
        return self._give("cudaDeviceGetAttribute", place, 9 if attribute == 75 else 0)

    def cudaSetDevice(self, index: int) -> int:  # noqa: N802
        self.used.append(index)
        return self._code("cudaSetDevice")

    def cudaMemGetInfo(self, free: Any, total: Any) -> int:  # noqa: N802
        free._obj.value, total._obj.value = 80 * GIB - self.claimed, 80 * GIB
        return self._code("cudaMemGetInfo")

    def cudaGetDeviceProperties(self, place: Any, index: int) -> int:  # noqa: N802
        place[: 256 + 16] = b"NVIDIA Fake".ljust(256, b"\0") + bytes([index]) * 16
        return self._code("cudaGetDeviceProperties")

    def cudaStreamCreateWithFlags(self, place: Any, flags: int) -> int:  # noqa: N802
        return self._give("cudaStreamCreateWithFlags", place, 77)

    def cudaStreamSynchronize(self, stream: Any) -> int:  # noqa: N802
        assert stream.value == 77
        return self._code("cudaStreamSynchronize")

    def cudaMalloc(self, place: Any, size: Any) -> int:  # noqa: N802
        if size.value > 80 * GIB:
            return 2
        block = ctypes.create_string_buffer(b"\xff" * size.value, size.value)
        self.blocks[ctypes.addressof(block)] = block
        return self._give("cudaMalloc", place, ctypes.addressof(block))

    def cudaFree(self, pointer: Any) -> int:  # noqa: N802
        del self.blocks[pointer.value]
        return 0

    def cudaMemcpyAsync(self, target: Any, source: Any, size: Any, kind: int, stream: Any) -> int:  # noqa: N802
        assert stream.value == 77
        ctypes.memmove(target.value, source.value, size.value)
        return self._code("cudaMemcpyAsync")

    def cudaMemsetAsync(self, target: Any, value: int, size: Any, stream: Any) -> int:  # noqa: N802
        ctypes.memset(target.value, value, size.value)
        return self._code("cudaMemsetAsync")


class FakeBlas:
    """cuBLAS's sum."""

    def cublasCreate_v2(self, handle: Any) -> int:  # noqa: N802
        return 0

    def cublasSetStream_v2(self, handle: Any, stream: Any) -> int:  # noqa: N802
        return 0

    def cublasSaxpy_v2_64(  # noqa: N802
        self, handle: Any, count: Any, factor: Any, x: Any, x_step: Any, y: Any, y_step: Any
    ) -> int:
        arrays = [np.ctypeslib.as_array((ctypes.c_float * count.value).from_address(each.value)) for each in (x, y)]
        arrays[1] += factor._obj.value * arrays[0]
        return 0


def fake_device(library: FakeCuda | None = None) -> CudaDevice:
    """A GPU that is none."""
    runtime = Runtime(library or FakeCuda())
    return CudaDevice(runtime, runtime.describe(0))
