"""operators.c on ONNX Runtime's CPU provider, with fused kernels compiled as C++ from their CUDA source.

What it cannot show: speed, and differences in a GPU's rounding.
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ortflow.workflow.cuda import SUMMING, operators
from ortflow.workflow.fusion.source import CONVERSIONS
from ortflow.workflow.onnx_runtime import onnxruntime

_SOURCE = Path(operators.__file__).parent / "operators.c"
_HEADERS = _SOURCE.parent.parent / "kernels"
CC, CXX = shutil.which("gcc"), shutil.which("g++")
needs_compilers = pytest.mark.skipif(CC is None or CXX is None, reason="needs gcc and g++")
HOST = """
#include <cmath>
#include <cstring>
#define __device__
#define __grid_constant__
#define __global__
#define __forceinline__ inline
static thread_local struct { unsigned x, y; } blockIdx, threadIdx, blockDim = {1}, gridDim = {1};
static float __int_as_float(unsigned bits) { float value; memcpy(&value, &bits, 4); return value; }
static int __float_as_int(float value) { int bits; memcpy(&bits, &value, 4); return bits; }
static float from_fp16(unsigned short x) { _Float16 y; memcpy(&y, &x, 2); return y; }
static unsigned short to_fp16(float x) { _Float16 y = x; unsigned short z; memcpy(&z, &y, 2); return z; }
static unsigned short to_bf16(float x) {
    unsigned bits = __float_as_int(x);
    return x != x ? 0x7fff : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
static float quick_exp(float x) { return expf(x); }
static float quick_inverse(float x) { return 1 / x; }
"""
_LAUNCH = """
typedef void (*Body)(unsigned gx, unsigned gy, unsigned bx, void **parameters);
int launch(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
           unsigned shared, void *stream, void **parameters, void **extra) {
    ((Body)function)(gx, gy, bx, parameters);
    return 0;
}
"""


def compiled(compiler: str | None, folder: Path, name: str, text: str, *flags: str) -> Path:
    """A shared library of a source."""
    assert compiler is not None
    key = hashlib.sha256(repr((text, flags)).encode()).hexdigest()[:16]
    source, made = folder / f"{key}-{name}", folder / f"{key}.so"
    if not made.exists():
        source.write_text(text)
        subprocess.run([compiler, "-shared", "-fPIC", "-w", *flags, "-o", str(made), str(source)], check=True)
    return made


class _Compiler:
    """Replaces NVRTC and the driver."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.launched: list[str] = []
        launch = ctypes.CDLL(str(compiled(CC, folder, "launch.c", _LAUNCH)))
        self.driver = SimpleNamespace(cuLaunchKernel=launch.launch)

    def function(self, source: str, name: str, options: Any = ()) -> ctypes.c_void_p:
        operands = source[source.index(f"void {name}(") :].split(")")[0].count("Operand ")
        arguments = ", ".join(f"*(Operand *)a[{place}]" for place in range(operands))
        numbers = f"*(unsigned long long *)a[{operands}]"
        if name in SUMMING:
            numbers += f", *(unsigned long long *)a[{operands + 1}], *(float **)a[{operands + 2}]"
        program = f"""{HOST}{source.replace(CONVERSIONS, "")}
        extern "C" void run(unsigned gx, unsigned gy, unsigned bx, void **a) {{
            gridDim.x = gx, gridDim.y = gy, blockDim.x = bx;
            for (blockIdx.y = 0; blockIdx.y < gy; blockIdx.y++)
                for (blockIdx.x = 0; blockIdx.x < gx; blockIdx.x++)
                    for (threadIdx.x = 0; threadIdx.x < bx; threadIdx.x++)
                        {name}({arguments}, {numbers});
        }}"""
        library = ctypes.CDLL(str(compiled(CXX, self._folder, "kernel.cpp", program, "-O1", "-ffp-contract=off")))
        return ctypes.cast(library.run, ctypes.c_void_p)


def operators_here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> operators.Operators:
    """The operators of this process, without a GPU."""
    text = _SOURCE.read_text()
    path = compiled(CC, folder, "operators.c", text, '-DPROVIDER="CPUExecutionProvider"', f"-I{_HEADERS}", "-std=gnu11")
    monkeypatch.setattr(operators, "operator_library", lambda: (path, ""))
    monkeypatch.setattr(operators, "Compiler", lambda capability: _Compiler(folder))
    device: Any = SimpleNamespace(gpu=SimpleNamespace(capability=(9, 0)), stream=0)
    return operators.Operators(device)


def session_of(made: operators.Operators, model: bytes) -> onnxruntime.InferenceSession:
    """A session that runs nodes of `ortflow.cuda` on the CPU, as `Sessions.open` opens one on a GPU."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
    options.enable_mem_reuse = options.enable_mem_pattern = False
    content = made.bind(model)
    options.register_custom_ops_library(str(made.path))
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
