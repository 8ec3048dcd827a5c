"""Replaces small memsets of captured CUDA graphs by kernels.

cuBLAS and cuDNN set a few bytes before many of their kernels. Such a node delays the next one by 1 us in a graph that
is a chain and by 10 us in one that forks (docs/benchmarks.md); a kernel does not.
"""

from __future__ import annotations

import ctypes
from typing import Any

from ortflow.workflow.cuda.nvrtc import Compiler
from ortflow.workflow.cuda.source import source
from ortflow.workflow.errors import OrtflowError

LARGEST = 4096
"""Bytes of a memset that a single thread block sets at once."""
_MEMSET, _ALLOCATES, _FREES = 2, 10, 11
"""CUgraphNodeType: a memset, and nodes that allocate and free memory."""
_THREADS = 128
_FUNCTIONS = (
    "cuGraphGetNodes", "cuGraphNodeGetType", "cuGraphMemsetNodeGetParams", "cuGraphNodeGetDependencies",
    "cuGraphNodeGetDependentNodes", "cuGraphAddKernelNode", "cuGraphAddDependencies", "cuGraphDestroyNode",
)  # fmt: skip
_Nodes = ctypes.Array[ctypes.c_void_p]


class _Memset(ctypes.Structure):
    """CUDA_MEMSET_NODE_PARAMS."""

    _fields_ = (
        ("target", ctypes.c_uint64), ("pitch", ctypes.c_size_t), ("value", ctypes.c_uint), ("element", ctypes.c_uint),
        ("width", ctypes.c_size_t), ("height", ctypes.c_size_t),
    )  # fmt: skip

    @property
    def size(self) -> int:
        """Bytes, if they are contiguous."""
        return int(self.element) * int(self.width)


class _Kernel(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS, version 1."""

    _fields_ = (
        ("function", ctypes.c_void_p), ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint), ("arguments", ctypes.POINTER(ctypes.c_void_p)), ("extra", ctypes.c_void_p),
    )  # fmt: skip


def memsets_as_kernels(compiler: Compiler, graph: int) -> int:
    """Replace the small memsets of a graph, which must not be instantiated yet; returns how many.

    They stay in a graph that allocates memory, which cannot be changed, and where the driver does not describe their
    edges by the ends alone. Raises OrtflowError.
    """
    driver, count = compiler.driver, 0
    if not all(hasattr(driver, name) for name in _FUNCTIONS):
        return 0
    kinds = {node: _kind(driver, node) for node in _listed(driver.cuGraphGetNodes, ctypes.c_void_p(graph)) or ()}
    if not {_ALLOCATES, _FREES}.isdisjoint(kinds.values()):
        return 0
    for node, kind in kinds.items():
        memset = _Memset()
        if kind != _MEMSET:
            continue
        _check(driver.cuGraphMemsetNodeGetParams(ctypes.c_void_p(node), ctypes.byref(memset)))
        if memset.height == 1 and memset.size <= LARGEST:
            count += _replace(compiler, graph, node, memset)
    return count


def _kind(driver: Any, node: int) -> int:
    kind = ctypes.c_int()
    _check(driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)))
    return kind.value


def _replace(compiler: Compiler, graph: int, node: int, memset: _Memset) -> bool:
    driver = compiler.driver
    before = _listed(driver.cuGraphNodeGetDependencies, ctypes.c_void_p(node))
    after = _listed(driver.cuGraphNodeGetDependentNodes, ctypes.c_void_p(node))
    if before is None or after is None:
        return False
    values = (
        ctypes.c_void_p(memset.target), ctypes.c_int(ctypes.c_int32(memset.value).value), ctypes.c_int(memset.element),
        ctypes.c_int(memset.size),
    )  # fmt: skip
    arguments = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    kernel = _Kernel(
        compiler.function(source("memsets", ()), "set_bytes"), (1, 1, 1), (_THREADS, 1, 1), 0, arguments, None
    )  # fmt: skip
    made = ctypes.c_void_p()
    counted = ctypes.c_size_t(len(before))
    _check(
        driver.cuGraphAddKernelNode(
            ctypes.byref(made), ctypes.c_void_p(graph), _array(before), counted, ctypes.byref(kernel)
        )
    )
    if after:
        sources = _array([made.value or 0] * len(after))
        counted = ctypes.c_size_t(len(after))
        _check(driver.cuGraphAddDependencies(ctypes.c_void_p(graph), sources, _array(after), counted))
    _check(driver.cuGraphDestroyNode(ctypes.c_void_p(node)))
    return True


def _listed(query: Any, of: ctypes.c_void_p) -> list[int] | None:
    """What a query of nodes returns; None if it fails, as for edges with more data than their ends."""
    count = ctypes.c_size_t()
    if query(of, None, ctypes.byref(count)):
        return None
    nodes = (ctypes.c_void_p * count.value)()
    if count.value and query(of, nodes, ctypes.byref(count)):
        return None
    return [int(node or 0) for node in nodes]


def _array(nodes: list[int]) -> _Nodes:
    return (ctypes.c_void_p * len(nodes))(*nodes)


def _check(code: int) -> None:
    if code:
        raise OrtflowError(f"a memset of a CUDA graph cannot be replaced (error {code})")
