"""Fused kernels on a GPU: compiled by NVRTC, kept on disk, loaded, and given to the operator of fused.c.

The operator is C, because ONNX Runtime calls it for each node; any C compiler builds it, once. NVRTC comes with
`ortflow[cuda]`. Where either is missing, graphs run unfused, and `note` says why.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx

from ortflow.workflow.device.cudart import major, preload
from ortflow.workflow.errors import OrtflowError
from ortflow.workflow.fusion import DOMAIN
from ortflow.workflow.graph.edit import attributes_of
from ortflow.workflow.kernels.library import cache_folders, compile_to, compilers
from ortflow.workflow.rundir import write_atomically

if TYPE_CHECKING:
    from ortflow.workflow.device.cuda import CudaDevice

_SOURCE = Path(__file__).parent / "fused.c"
_HEADERS = Path(__file__).parent.parent / "kernels"
_FLAGS = ("-shared", "-fPIC", "-O2", "-std=gnu11", "-w")
_SECONDS = 120
_OPTIONS = ("--fmad=false",)
"""Without fused multiply-add, a kernel gives what ONNX Runtime's own give one after the other, to the bit."""


@functools.cache
def operator_library() -> tuple[Path | None, str]:
    """The compiled operator, and why there is none."""
    key = hashlib.sha256(repr(_FLAGS).encode() + _SOURCE.read_bytes() + (_HEADERS / "ort.h").read_bytes())
    name = f"fused-{key.hexdigest()[:16]}.so"
    reason = "there is no C compiler: `pip install 'ortflow[kernels]'` brings one"
    for folder in cache_folders("kernels"):
        if (folder / name).exists():
            return folder / name, ""
    for folder in cache_folders("kernels"):
        for compiler in compilers():
            command = [*compiler, *_FLAGS, f"-I{_HEADERS}", str(_SOURCE)]
            fault = compile_to(folder / name, command, seconds=_SECONDS)
            if fault is None:
                return folder / name, ""
            reason = f"{shlex.join(compiler)} failed: {fault}"
    return None, reason


_loaded: set[tuple[int, str]] = set()
"""Device and source of what the operator has: it keeps a function for a source, in the context of one device."""


class FusedKernels:
    """The kernels of a process, on its GPU."""

    def __init__(self, device: CudaDevice) -> None:
        path, self.note = operator_library()
        self.path: Path | None = None
        try:
            preload()
            self._nvrtc: Any = ctypes.CDLL(f"libnvrtc.so.{major()}")
            self._driver: Any = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            self.note = str(error)
            return
        if path is None:
            return
        self.path = path
        self._operator: Any = ctypes.CDLL(str(path))
        self._stream = device.stream
        self._architecture = "sm_{}{}".format(*device.gpu.capability)
        self._index = device.index

    def load(self, model: bytes) -> None:
        """Make every kernel of a graph ready, for the session that is made next.

        Raises OrtflowError where one is not taken.
        """
        launch = ctypes.cast(self._driver.cuLaunchKernel, ctypes.c_void_p)
        self._operator.ortflow_fused_setup(launch, ctypes.c_void_p(self._stream))
        sources = sources_of(onnx.ModelProto.FromString(model))
        for source in sources:
            if (self._index, source) in _loaded:
                continue
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            image = self._image(source)
            code = self._driver.cuModuleLoadData(ctypes.byref(module), image)
            code = code or self._driver.cuModuleGetFunction(ctypes.byref(function), module, b"fused")
            if code or not self._operator.ortflow_fused_add(source.encode(), function):
                raise OrtflowError(f"CUDA does not take a fused kernel (error {code})")
            _loaded.add((self._index, source))

    def _image(self, source: str) -> bytes:
        """Machine code of a source, from the cache if it is there."""
        version = ctypes.c_int(), ctypes.c_int()
        self._nvrtc.nvrtcVersion(*map(ctypes.byref, version))
        made_from = (source, self._architecture, _OPTIONS, [part.value for part in version])
        name = f"{hashlib.sha256(repr(made_from).encode()).hexdigest()}.cubin"
        folders = list(cache_folders("cubins"))
        for folder in folders:
            if (folder / name).exists():
                return (folder / name).read_bytes()
        image = self._compiled(source)
        for folder in folders[:1]:
            write_atomically(folder / name, image)
        return image

    def _compiled(self, source: str) -> bytes:
        nvrtc, program, size = self._nvrtc, ctypes.c_void_p(), ctypes.c_size_t()
        _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"fused.cu", 0, None, None))
        options = [f"--gpu-architecture={self._architecture}", *_OPTIONS]
        words = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        code = nvrtc.nvrtcCompileProgram(program, len(options), words)
        if code:
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise OrtflowError(f"NVRTC does not compile a fused kernel: {log.value.decode(errors='replace')[:500]}")
        _check(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        image = ctypes.create_string_buffer(size.value)
        _check(nvrtc.nvrtcGetCUBIN(program, image))
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
        return image.raw


def sources_of(model: onnx.ModelProto) -> list[str]:
    """Sources of the fused nodes of a graph, each once."""
    found = (attributes_of(node)["source"] for node in model.graph.node if node.domain == DOMAIN)
    return list(dict.fromkeys(text.decode() if isinstance(text, bytes) else str(text) for text in found))


def _check(code: int) -> None:
    if code:
        raise OrtflowError(f"NVRTC failed with status {code}")
