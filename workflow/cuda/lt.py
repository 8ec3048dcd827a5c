"""cuBLASLt: product of two half-precision matrices, with an optional fp32 result, bias and residual.

Used by `product`. Of the algorithms that the library proposes for a shape the fastest is taken, by measurement, and
kept (`algorithms`): another start, on another node with the same GPU model and library, takes the same one, so that a
resumed run continues to the bit.
"""

from __future__ import annotations

import ctypes
import time
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any

from onnx import TensorProto

from ortflow.workflow.cuda.algorithms import Choices, choices, fastest
from ortflow.workflow.device.cudart import Runtime, runtime
from ortflow.workflow.device.libraries import major, preload
from ortflow.workflow.errors import OrtflowError

WORKSPACE = 32 << 20
"""In bytes; NVIDIA's recommendation for Hopper."""
TYPES = {int(TensorProto.FLOAT): 0, int(TensorProto.FLOAT16): 2, int(TensorProto.BFLOAT16): 14}
"""Element type of onnx.TensorProto -> cudaDataType_t."""
_COMPUTE_32F = 68
_TRANSA, _TRANSB, _EPILOGUE, _BIAS_POINTER = 3, 4, 7, 8
# The epilogues of Gelu are left out: cuBLASLt has the approximation by tanh alone, and DGELU_BGRAD took 464 us on an
# H200, where the product and a kernel for the rest take 200.
_DEFAULT, _BIAS = 1, 4
_MAX_WORKSPACE, _REDUCTIONS, _ALIGNMENTS = 1, 3, (5, 6, 7, 8)
_IN_FP32 = 2
"""Of the ways to sum the pieces of a product that is divided along its depth: CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE.
The others round the pieces to 16 bits, or add them in the order in which they are ready, which differs from run to run.
"""
_LARGEST_ALIGNMENT = 256
PROPOSED = 8
"""Algorithms that are measured, at most: of 24 the fastest was among these on an H200."""
ROUNDS = 5
"""Runs of each that are timed, behind one that is not."""


_Algorithm = c_uint64 * 8
"""cublasLtMatmulAlgo_t, which may be kept and used again with the same library."""


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", _Algorithm), ("workspace", c_size_t), ("state", c_int), ("waves", c_float),
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
    residual: bool = False
    """Whether [rows, columns] of the result's type are added."""


@dataclass(frozen=True)
class Place:
    """Where a product is computed: device pointers, WORKSPACE bytes, and a stream. What is not added is 0."""

    a: int
    b: int
    result: int
    bias: int
    workspace: int
    stream: int
    residual: int = 0


class Library:
    """cuBLASLt's handle of this process; `gpu` is the model's name."""

    def __init__(self, gpu: str, library: Any = None, cuda: Runtime | None = None, kept: Choices | None = None) -> None:
        preload()
        self._library: Any = library or ctypes.CDLL(f"libcublasLt.so.{major()}")
        self._cuda, self._kept = cuda or runtime(), kept or choices()
        self._handle = c_void_p()
        self._call("Create", byref(self._handle))
        self._library.cublasLtGetVersion.restype = c_size_t
        self.identity = f"{gpu}, cuBLASLt {self._library.cublasLtGetVersion()}"
        """The GPU and the version of the library: part of the key of a choice."""
        self._plans: dict[tuple[Shape, tuple[int, ...]], _Plan] = {}

    def run(self, shape: Shape, place: Place, *, measures: bool = True) -> None:
        """Queue result = a b + bias + residual. Raises OrtflowError.

        The first product of a shape waits for the GPU, to measure; not so with `measures` false, as while a CUDA graph
        is captured: then the first algorithm that the library proposes computes it, and the next product measures.
        """
        # The library's matrices are column-major, so it computes result' = b' a'.
        pointers = place.b, place.a, place.residual or place.result, place.result
        key = shape, tuple(min(pointer & -pointer, _LARGEST_ALIGNMENT) for pointer in pointers)
        plan = self._plans.get(key)
        if plan is None:
            plan, settled = self._planned(*key, place if measures else None)
            if settled:
                self._plans[key] = plan
        self._check("Matmul", self._matmul(plan, plan.algorithm, place))

    def _matmul(self, plan: _Plan, algorithm: Any, place: Place) -> int:
        """The status of queueing it."""
        if place.bias:
            self._set("MatmulDescSetAttribute", plan.operation, _BIAS_POINTER, c_void_p(place.bias))
        first, second, out = plan.layouts
        result, added = c_void_p(place.result), c_void_p(place.residual or place.result)
        return int(
            self._library.cublasLtMatmul(
                self._handle, plan.operation, byref(c_float(1)), c_void_p(place.b), first, c_void_p(place.a), second,
                byref(c_float(bool(place.residual))), added, out, result, out, byref(algorithm),
                c_void_p(place.workspace), c_size_t(WORKSPACE), c_void_p(place.stream),
            )
        )  # fmt: skip

    def _planned(self, shape: Shape, alignments: tuple[int, ...], place: Place | None) -> tuple[_Plan, bool]:
        """How to compute a shape, and whether that is settled."""
        operation, layouts, proposed = self._proposed(shape, alignments)
        plan = _Plan(operation, layouts, proposed[0])
        key = f"{self.identity}, {shape}, alignments {alignments}"
        found = self._kept.find(key)
        if found is not None and len(found) == ctypes.sizeof(_Algorithm):
            algorithm = _Algorithm.from_buffer_copy(found)
            # A file that is whole may still come from a library with the same number and other algorithms.
            if any(bytes(proposal) == found for proposal in proposed):
                return _Plan(operation, layouts, algorithm), True
        if place is None:
            return plan, len(proposed) == 1
        try:
            # Up to 12% of a product on an H200: 83 us in place of 94.
            best = proposed[fastest([self._seconds(plan, proposal, place) for proposal in proposed])]
        except ValueError as error:
            raise OrtflowError(f"cuBLASLt: {error} of {shape}") from error
        settled = self._kept.settle(key, bytes(best))
        if not any(bytes(proposal) == settled for proposal in proposed):
            settled = bytes(best)
        return _Plan(operation, layouts, _Algorithm.from_buffer_copy(settled)), True

    def _seconds(self, plan: _Plan, algorithm: Any, place: Place) -> float | None:
        """Of one product; None if the algorithm does not compute it."""
        if self._matmul(plan, algorithm, place):
            return None
        self._cuda.wait(place.stream)
        begun = time.perf_counter()
        for _ in range(ROUNDS):
            self._matmul(plan, algorithm, place)
        self._cuda.wait(place.stream)
        return (time.perf_counter() - begun) / ROUNDS

    def _proposed(
        self, shape: Shape, alignments: tuple[int, ...]
    ) -> tuple[c_void_p, tuple[c_void_p, c_void_p, c_void_p], list[Any]]:
        """The operation, the layouts of its matrices, and the algorithms that the library proposes, best first."""
        operation, preference, count = c_void_p(), c_void_p(), c_int()
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
        self._set("MatmulPreferenceSetAttribute", preference, _REDUCTIONS, c_uint32(_IN_FP32))
        for name, alignment in zip(_ALIGNMENTS, alignments, strict=True):
            self._set("MatmulPreferenceSetAttribute", preference, name, c_uint32(alignment))
        proposed = (_Heuristic * PROPOSED)()
        first, second, out = layouts
        self._call(
            "MatmulAlgoGetHeuristic", self._handle, operation, first, second, out, out, preference, c_int(PROPOSED),
            proposed, byref(count),
        )  # fmt: skip
        self._call("MatmulPreferenceDestroy", preference)
        algorithms = [
            _Algorithm.from_buffer_copy(bytes(proposal.algorithm))
            for proposal in proposed[: count.value]
            if not proposal.state
        ]
        if not algorithms:
            raise OrtflowError(f"cuBLASLt has no algorithm for {shape}")
        return operation, layouts, algorithms

    def _layout(self, kind: int, rows: int, columns: int) -> c_void_p:
        layout = c_void_p()
        self._call(
            "MatrixLayoutCreate", byref(layout), c_int(TYPES[kind]), c_uint64(rows), c_uint64(columns), c_int64(rows)
        )
        return layout

    def _set(self, function: str, owner: c_void_p, name: int, value: Any) -> None:
        self._call(function, owner, c_int(name), byref(value), c_size_t(ctypes.sizeof(value)))

    def _call(self, name: str, *arguments: Any) -> None:
        self._check(name, int(getattr(self._library, f"cublasLt{name}")(*arguments)))

    def _check(self, name: str, code: int) -> None:
        if code:
            raise OrtflowError(f"cublasLt{name} failed with status {code}")


@dataclass(frozen=True)
class _Plan:
    operation: c_void_p
    layouts: tuple[c_void_p, c_void_p, c_void_p]
    algorithm: Any


@cache
def library(gpu: str) -> Library:
    """The library of this process, on a GPU of the model `gpu`."""
    return Library(gpu)
