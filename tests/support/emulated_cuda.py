"""Runs operators of `ortflow.cuda` on the CPU: their CUDA compiled as C++, threads as fibers (emulated_cuda.h).

What it cannot show: speed, races between blocks, and differences in a GPU's rounding.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from onnx import TensorProto

from ortflow.workflow.cuda.operators import Tensor

Array = npt.NDArray[Any]
_COMPILER = shutil.which("g++")
needs_emulation = pytest.mark.skipif(_COMPILER is None, reason="needs g++ to run CUDA's source on the processor")
_HEADER = Path(__file__).parent / "emulated_cuda.h"
_TYPES = Path(__file__).parents[2] / "workflow" / "cuda" / "types.cuh"
_KERNEL = re.compile(r'extern "C" __global__ void\s+(?:__launch_bounds__\([\w, /]+\)\s+)?(\w+)\(([^)]*)\)')
_ARGUMENTS: dict[str, Any] = {"*": ctypes.c_void_p, "i64": ctypes.c_int64, "int": ctypes.c_int, "float": ctypes.c_float}
FORM = "2"
"""Of the compiled files: to be changed with the compiler's options."""
_GUARD = 64
_FILL = 0xFF
"""Bytes that make no number of every type."""
SIZES = {
    TensorProto.FLOAT: 4, TensorProto.FLOAT16: 2, TensorProto.BFLOAT16: 2, TensorProto.INT64: 8, TensorProto.UINT8: 1
}  # fmt: skip


def parameters(source: str) -> dict[str, list[str]]:
    """Kernel -> the types of its parameters, pointers as `*`."""
    found = {}
    for name, text in _KERNEL.findall(source):
        found[name] = ["*" if "*" in part else part.split()[-2] for part in text.split(",")]
    return found


@functools.cache
def _library(source: str) -> Any:
    text = source.replace(_TYPES.read_text(), "", 1)
    assert text != source
    wrappers = []
    for name, kinds in parameters(source).items():
        given = ", ".join(f"*(void **)a[{i}]" if kind == "*" else f"*({kind} *)a[{i}]" for i, kind in enumerate(kinds))
        wrappers.append(
            f"static void body_{name}(void **a) {{ call({name}, {given}); }}\n"
            f'extern "C" const char *run_{name}(const u32 *grid, const u32 *block, void **a) {{\n'
            f"    return emulate(grid, block, body_{name}, a);\n}}"
        )
    call = """
    struct Any { void *p; template <class T> operator T *() const { return (T *)p; } };
    inline Any given(void *p) { return {p}; }
    template <class T> inline T given(T x) { return x; }
    template <class F, class... A> void call(F f, A... a) { f(given(a)...); }
    """
    folder = Path(tempfile.gettempdir()) / "ortflow-emulated"
    folder.mkdir(exist_ok=True)
    program = f"{_HEADER.read_text()}\n{text}\n{call}\n" + "\n".join(wrappers)
    path = folder / f"{hashlib.sha256((program + FORM).encode()).hexdigest()[:24]}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=folder) as work:
            (Path(work) / "k.cc").write_text(program)
            command = [
                # Shared memory of a function that several sources define must not be one for all of them.
                str(_COMPILER), "-fno-gnu-unique", "-std=c++17", "-O1", "-w", "-fPIC", "-shared",
                "-fno-strict-aliasing", "-o", f"{work}/k.so", f"{work}/k.cc",
            ]  # fmt: skip
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr[:3000]
            (Path(work) / "k.so").rename(path)
    return ctypes.CDLL(str(path))


class Memory:
    """Bytes with guards around them."""

    def __init__(self, size: int, offset: int = 0) -> None:
        self.size = size
        self._bytes = np.full(size + 3 * _GUARD + offset, _FILL, np.uint8)
        self._start = -self._bytes.ctypes.data % _GUARD + _GUARD + offset
        self.pointer = self._bytes.ctypes.data + self._start

    @property
    def content(self) -> npt.NDArray[np.uint8]:
        return self._bytes[self._start : self._start + self.size]

    def check(self) -> None:
        around = np.concatenate([self._bytes[: self._start], self._bytes[self._start + self.size :]])
        assert (around == _FILL).all(), "written before the beginning or behind the end"


def to_bytes(array: Array, kind: int) -> npt.NDArray[np.uint8]:
    """An array of fp32 (or int64) as the element type stores it; bf16 rounds to nearest even."""
    if kind == TensorProto.BFLOAT16:
        words = np.ascontiguousarray(array, np.float32).view(np.uint32)
        rounded = ((words.astype(np.uint64) + 0x7FFF + ((words >> 16) & 1)) >> 16).astype(np.uint16)
        return rounded.reshape(-1).view(np.uint8)
    types = {
        TensorProto.FLOAT: np.float32, TensorProto.FLOAT16: np.float16, TensorProto.INT64: np.int64,
        TensorProto.UINT8: np.uint8,
    }  # fmt: skip
    return np.ascontiguousarray(array, types[kind]).reshape(-1).view(np.uint8)


def from_bytes(content: npt.NDArray[np.uint8], kind: int, shape: Sequence[int]) -> Array:
    """The stored array as fp32."""
    if kind == TensorProto.BFLOAT16:
        return (content.copy().view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(shape)
    types = {TensorProto.FLOAT: np.float32, TensorProto.FLOAT16: np.float16, TensorProto.UINT8: np.uint8}
    return content.copy().view(types[kind]).astype(np.float32).reshape(shape)


def _structure(name: str) -> type[ctypes.Structure]:
    """The class for a structure of the source."""
    (found,) = (kind for kind in ctypes.Structure.__subclasses__() if kind.__name__ == name)
    return found


class EmulatedCall:
    """One execution of one node, as the operators see it."""

    stream = 0

    def __init__(
        self, inputs: Sequence[tuple[Array, int] | None], types: Sequence[int], offset: int = 0, *, run: bool = True
    ) -> None:
        """`offset`: bytes by which every tensor is off a multiple of 64; without `run`, kernels are only noted."""
        self.types, self._offset, self._run = types, offset, run
        self.memories: list[Memory] = []
        self.made: dict[int, tuple[Memory, tuple[int, ...]]] = {}
        self.launched: list[tuple[str, str]] = []
        self.inputs: list[Tensor | None] = []
        for given in inputs:
            if given is None:
                self.inputs.append(None)
                continue
            array, kind = given
            content = to_bytes(array, kind)
            memory = self.memory(content.size, offset if kind != TensorProto.INT64 else 0)
            memory.content[:] = content
            self.inputs.append(Tensor(memory.pointer, array.shape, kind))
        self._scratches = 0
        self._counters: list[Memory] = []

    def memory(self, size: int, offset: int = 0) -> Memory:
        self.memories.append(Memory(size, offset))
        return self.memories[-1]

    def given(self, place: int) -> Tensor:
        found = self.inputs[place]
        assert found is not None
        return found

    def output(self, place: int, shape: Sequence[int]) -> int:
        assert place not in self.made
        memory = self.memory(int(np.prod(shape, dtype=np.int64)) * SIZES[self.types[place]], self._offset)
        self.made[place] = memory, tuple(shape)
        return memory.pointer

    def scratch(self, size: int) -> int:
        self._scratches += 1
        assert self._scratches == 1, "a second call gives the same memory"
        return self.memory(size).pointer

    def counters(self, count: int) -> int:
        self._counters.append(self.memory(4 * count))
        self._counters[-1].content[:] = 0
        return self._counters[-1].pointer

    def launch(
        self, source: str, function: str, grid: int | Sequence[int], block: int | Sequence[int], *arguments: Any
    ) -> None:
        grids, blocks = (([*size, 1, 1] if not isinstance(size, int) else [size, 1, 1])[:3] for size in (grid, block))
        assert min(grids) > 0, (function, grids)
        assert grids[0] < 1 << 31, (function, grids)
        assert grids[1] < 1 << 16, (function, grids)
        assert blocks[0] <= 1024, (function, blocks)
        assert blocks[0] % 32 == 0, (function, blocks)
        kinds = parameters(source)[function]
        wanted = [_ARGUMENTS.get(kind) or _structure(kind) for kind in kinds]
        assert [type(argument) for argument in arguments] == wanted, (function, kinds, arguments)
        self.launched.append((source, function))
        if not self._run:
            return
        kernel = getattr(_library(source), f"run_{function}")
        kernel.restype = ctypes.c_char_p
        values = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(value) for value in arguments))
        fault = kernel((ctypes.c_uint * 3)(*grids), (ctypes.c_uint * 3)(*blocks), values)
        assert fault is None, f"{function}: {fault.decode()}"

    def results(self) -> list[Array]:
        for memory in self.memories:
            memory.check()
        assert not any(memory.content.any() for memory in self._counters), "counters must be 0 for the next node"
        assert sorted(self.made) == list(range(len(self.types)))
        return [
            from_bytes(self.made[place][0].content, kind, self.made[place][1]) for place, kind in enumerate(self.types)
        ]
