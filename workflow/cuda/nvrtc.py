"""Compiles CUDA source with NVRTC for the present GPU, caches it on disk and loads it into this process."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ortflow.workflow.device.libraries import major, preload
from ortflow.workflow.errors import OrtflowError
from ortflow.workflow.run.rundir import write_atomically
from ortflow.workflow.system.cache_folders import cache_folders

EXACT = ("--fmad=false",)
"""Without fused multiply-add, an elementwise kernel is bit-identical to ONNX Runtime's kernels run one by one."""
ROUNDED = ("--prec-div=false", "--prec-sqrt=false", "--ftz=true")
"""For kernels that store only halves: errors of 2 units in the last place of fp32 do not matter."""


class Compiler:
    """Compiles for one architecture. Raises OSError if NVRTC or the driver is missing."""

    def __init__(self, capability: tuple[int, int]) -> None:
        preload()
        self._nvrtc: Any = ctypes.CDLL(f"libnvrtc.so.{major()}")
        self.driver: Any = ctypes.CDLL("libcuda.so.1")
        self._architecture = "sm_{}{}".format(*capability)
        self._modules: dict[tuple[str, tuple[str, ...]], ctypes.c_void_p] = {}
        self._functions: dict[tuple[str, str, tuple[str, ...]], ctypes.c_void_p] = {}

    def function(self, source: str, name: str, options: Sequence[str] = ()) -> ctypes.c_void_p:
        """A kernel of a source, in the current context. Raises OrtflowError if it cannot be compiled or loaded."""
        key = source, name, tuple(options)
        if key not in self._functions:
            function = ctypes.c_void_p()
            module = self._module(source, key[2])
            _taken(self.driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
            self._functions[key] = function
        return self._functions[key]

    def _module(self, source: str, options: tuple[str, ...]) -> ctypes.c_void_p:
        if (source, options) not in self._modules:
            module = ctypes.c_void_p()
            _taken(self.driver.cuModuleLoadData(ctypes.byref(module), self._image(source, options)))
            self._modules[source, options] = module
        return self._modules[source, options]

    def _image(self, source: str, options: Sequence[str]) -> bytes:
        """Machine code of a source, from the cache if present."""
        version = ctypes.c_int(), ctypes.c_int()
        self._nvrtc.nvrtcVersion(*map(ctypes.byref, version))
        made_from = (source, self._architecture, tuple(options), [part.value for part in version])
        name = f"{hashlib.sha256(repr(made_from).encode()).hexdigest()}.cubin"
        folders = list(cache_folders("cubins"))
        for folder in folders:
            if (folder / name).exists():
                return (folder / name).read_bytes()
        image = compiled(self._nvrtc, source, self._architecture, options)
        for folder in folders[:1]:
            write_atomically(folder / name, image)
        return image


def compiled(nvrtc: Any, source: str, architecture: str, options: Sequence[str] = ()) -> bytes:
    """Compile a source to machine code. Raises OrtflowError with NVRTC's message."""
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"ortflow.cu", 0, None, None))
    # For a virtual architecture (compute_) NVRTC gives PTX, which the driver compiles when it is loaded.
    arguments = [f"--gpu-architecture={architecture}", *(f"-I{folder}" for folder in headers()), *options]
    array = (ctypes.c_char_p * len(arguments))(*(argument.encode() for argument in arguments))
    if nvrtc.nvrtcCompileProgram(program, len(arguments), array):
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise OrtflowError(f"NVRTC cannot compile a kernel: {log.value.decode(errors='replace')[:500]}")
    _check(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)))
    image = ctypes.create_string_buffer(size.value)
    _check(nvrtc.nvrtcGetCUBIN(program, image))
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return image.raw


def headers() -> list[Path]:
    """Folders with CUDA's headers in NVIDIA's packages."""
    package = importlib.util.find_spec("nvidia")
    folders = package.submodule_search_locations if package is not None else None
    places = [Path(folder, f"cu{major() or 13}", "include") for folder in folders or ()]
    return [folder for place in places for folder in (place, place / "cccl") if folder.is_dir()]


def _taken(code: int) -> None:
    if code:
        raise OrtflowError(f"CUDA cannot load a kernel (error {code})")


def _check(code: int) -> None:
    if code:
        raise OrtflowError(f"NVRTC failed with status {code}")
