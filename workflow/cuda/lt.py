"""cuBLASLt: product of two half-precision matrices, with an optional fp32 result and bias.

Used by `product`. The algorithm is the first that the library proposes for the shape, so a restart on another node with
the same GPU and library uses the same one, and a resumed run is bit-identical.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any

from onnx import TensorProto

from ortflow.workflow.device.cudart import major, preload
from ortflow.workflow.errors import OrtflowError

WORKSPACE = 32 << 20
"""In bytes; NVIDIA's recommendation for Hopper."""
TYPES = {int(TensorProto.FLOAT): 0, int(TensorProto.FLOAT16): 2, int(TensorProto.BFLOAT16): 14}
"""Element type of onnx.TensorProto -> cudaDataType_t."""
_COMPUTE_32F = 68
_TRANSA, _TRANSB, _EPILOGUE, _BIAS_POINTER = 3, 4, 7, 8
_DEFAULT, _BIAS = 1, 4
_MAX_WORKSPACE, _ALIGNMENTS = 1, (5, 6, 7, 8)
_LARGEST_ALIGNMENT = 256


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", c_uint64 * 8), ("workspace", c_size_t), ("state", c_int), ("waves", c_float),
        ("reserved", c_int * 4),
    )  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """Shape of a product: result [rows, columns] of factors [rows, depth] and [depth, columns], in row-major order.

    A transposed factor is stored transposed. Types are of onnx.TensorProto.
    """

    type: int
    result: int
    rows: int
    columns: int
    depth: int
    turn_a: bool
    turn_b: bool
    bias: bool
    """Whether [columns] of the result's type are added to each row."""


class Library:
    """cuBLASLt's handle of this process."""

    def __init__(self) -> None:
        preload()
        self._library: Any = ctypes.CDLL(f"libcublasLt.so.{major()}")
        self._handle = c_void_p()
        self._call("Create", byref(self._handle))
        self._plans: dict[tuple[Shape, tuple[int, ...]], _Plan] = {}

    def run(self, shape: Shape, a: int, b: int, result: int, bias: int, workspace: int, stream: int) -> None:
        """Queue result = a b + bias, with device pointers; `workspace` has WORKSPACE bytes. Raises OrtflowError."""
        # The library's matrices are column-major, so it computes result' = b' a'.
        pointers = b, a, result, result
        key = shape, tuple(min(pointer & -pointer, _LARGEST_ALIGNMENT) for pointer in pointers)
        if key not in self._plans:
            self._plans[key] = self._planned(*key)
        plan = self._plans[key]
        if shape.bias:
            self._set("MatmulDescSetAttribute", plan.operation, _BIAS_POINTER, c_void_p(bias))
        first, second, out = plan.layouts
        self._call(
            "Matmul", self._handle, plan.operation, byref(c_float(1)), c_void_p(b), first, c_void_p(a), second,
            byref(c_float(0)), c_void_p(result), out, c_void_p(result), out, byref(plan.algorithm),
            c_void_p(workspace), c_size_t(WORKSPACE), c_void_p(stream),
        )  # fmt: skip

    def _planned(self, shape: Shape, alignments: tuple[int, ...]) -> _Plan:
        operation, preference, found = c_void_p(), c_void_p(), c_int()
        self._call("MatmulDescCreate", byref(operation), c_int(_COMPUTE_32F), c_int(TYPES[int(TensorProto.FLOAT)]))
        self._set("MatmulDescSetAttribute", operation, _TRANSA, c_int32(shape.turn_b))
        self._set("MatmulDescSetAttribute", operation, _TRANSB, c_int32(shape.turn_a))
        self._set("MatmulDescSetAttribute", operation, _EPILOGUE, c_uint32(_BIAS if shape.bias else _DEFAULT))
        m, n, k = shape.columns, shape.rows, shape.depth
        layouts = (
            self._layout(shape.type, *((k, m) if shape.turn_b else (m, k))),
            self._layout(shape.type, *((n, k) if shape.turn_a else (k, n))),
            self._layout(shape.result, m, n),
        )
        self._call("MatmulPreferenceCreate", byref(preference))
        self._set("MatmulPreferenceSetAttribute", preference, _MAX_WORKSPACE, c_uint64(WORKSPACE))
        for name, alignment in zip(_ALIGNMENTS, alignments, strict=True):
            self._set("MatmulPreferenceSetAttribute", preference, name, c_uint32(alignment))
        proposed = _Heuristic()
        first, second, out = layouts
        self._call(
            "MatmulAlgoGetHeuristic", self._handle, operation, first, second, out, out, preference, c_int(1),
            byref(proposed), byref(found),
        )  # fmt: skip
        self._call("MatmulPreferenceDestroy", preference)
        if not found.value or proposed.state:
            raise OrtflowError(f"cuBLASLt has no algorithm for {shape}")
        return _Plan(operation, layouts, proposed.algorithm)

    def _layout(self, kind: int, rows: int, columns: int) -> c_void_p:
        made = c_void_p()
        self._call(
            "MatrixLayoutCreate", byref(made), c_int(TYPES[kind]), c_uint64(rows), c_uint64(columns), c_int64(rows)
        )
        return made

    def _set(self, function: str, owner: c_void_p, name: int, value: Any) -> None:
        self._call(function, owner, c_int(name), byref(value), c_size_t(ctypes.sizeof(value)))

    def _call(self, name: str, *arguments: Any) -> None:
        code = int(getattr(self._library, f"cublasLt{name}")(*arguments))
        if code:
            raise OrtflowError(f"cublasLt{name} failed with status {code}")


@dataclass(frozen=True)
class _Plan:
    operation: c_void_p
    layouts: tuple[c_void_p, c_void_p, c_void_p]
    algorithm: Any


@cache
def library() -> Library:
    """The library of this process."""
    return Library()
