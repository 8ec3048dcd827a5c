"""A trial rank's report of its GPUs, and whether NCCL connects them. Copied beside `node_report`; uses only ctypes.

Sums one number of each rank, on a GPU of each rank, with the installed driver and NCCL.
"""

from __future__ import annotations

import ctypes
import glob
import os
import site
from collections.abc import Callable
from typing import Any

_ID_BYTES = 128
_FLOAT32, _SUM = 7, 0
"""ncclDataType_t and ncclRedOp_t."""
_LOCAL_RANKS = ("SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")


class Failed(Exception):
    """A call that failed."""


class UniqueId(ctypes.Structure):
    """ncclUniqueId: passed by value."""

    _fields_ = (("internal", ctypes.c_char * _ID_BYTES),)


def collect(rank: int, size: int, gather: Callable[[Any], list[Any]]) -> dict[str, Any]:
    """GPUs of this rank and NCCL's result; `gather` returns to every rank the values of all ranks, in order."""
    report: dict[str, Any] = {"visible": os.environ.get("CUDA_VISIBLE_DEVICES")}
    nccl: ctypes.CDLL | None = None
    unique = UniqueId()
    try:
        report["count"] = _count()
        nccl = _library()
        version = ctypes.c_int()
        _checked(nccl, nccl.ncclGetVersion(ctypes.byref(version)), "ncclGetVersion")
        report["nccl"] = version.value
        if rank == 0:
            _checked(nccl, nccl.ncclGetUniqueId(ctypes.byref(unique)), "ncclGetUniqueId")
    except Failed as error:
        report["error"] = str(error)
    # The others would wait for a rank that cannot take part: all begin, or none.
    unique_ids = gather(None if "error" in report else bytes(unique))
    if nccl is None or None in unique_ids:
        return report
    # If each rank sees all GPUs of its node, every rank takes a different one.
    local = next((int(os.environ[name]) for name in _LOCAL_RANKS if name in os.environ), 0)
    try:
        report["sum"] = _sum(nccl, UniqueId.from_buffer_copy(unique_ids[0]), rank, size, local % int(report["count"]))
    except Failed as error:
        report["error"] = str(error)
    return report


def _count() -> int:
    """Number of GPUs that this process sees."""
    driver = _driver()
    _driven(driver.cuInit(0), "cuInit")
    count = ctypes.c_int()
    _driven(driver.cuDeviceGetCount(ctypes.byref(count)), "cuDeviceGetCount")
    if count.value == 0:
        raise Failed("the driver shows no GPU")
    return count.value


def _sum(nccl: ctypes.CDLL, unique: UniqueId, rank: int, size: int, gpu: int) -> float:
    driver = _driver()
    device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
    _driven(driver.cuDeviceGet(ctypes.byref(device), gpu), "cuDeviceGet")
    _driven(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "cuDevicePrimaryCtxRetain")
    _driven(driver.cuCtxSetCurrent(context), "cuCtxSetCurrent")
    # cuda.h maps the plain names to these; the plain symbols of the library take 32-bit sizes.
    _driven(driver.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(4)), "cuMemAlloc")
    value = ctypes.c_float(1.0)
    _driven(driver.cuMemcpyHtoD_v2(memory, ctypes.byref(value), ctypes.c_size_t(4)), "cuMemcpyHtoD")
    world = ctypes.c_void_p()
    nccl.ncclCommInitRank.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, UniqueId, ctypes.c_int]
    _checked(nccl, nccl.ncclCommInitRank(ctypes.byref(world), size, unique, rank), "ncclCommInitRank")
    counted = nccl.ncclAllReduce(memory, memory, ctypes.c_size_t(1), _FLOAT32, _SUM, world, None)
    _checked(nccl, counted, "ncclAllReduce")
    _driven(driver.cuCtxSynchronize(), "cuCtxSynchronize")
    _driven(driver.cuMemcpyDtoH_v2(ctypes.byref(value), memory, ctypes.c_size_t(4)), "cuMemcpyDtoH")
    _checked(nccl, nccl.ncclCommDestroy(world), "ncclCommDestroy")
    return value.value


def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise Failed(f"no CUDA driver: {error}") from error


def _library() -> ctypes.CDLL:
    """NCCL from pip, else from the system."""
    folders = [*site.getsitepackages(), site.getusersitepackages()]
    libraries = [path for folder in folders for path in glob.glob(f"{folder}/nvidia/nccl/lib/libnccl.so.2")]
    try:
        nccl = ctypes.CDLL([*libraries, "libnccl.so.2"][0])
    except OSError as error:
        raise Failed(f"no NCCL: {error}") from error
    nccl.ncclGetErrorString.restype = ctypes.c_char_p
    nccl.ncclGetLastError.restype, nccl.ncclGetLastError.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
    return nccl


def _checked(nccl: ctypes.CDLL, code: int, call: str) -> None:
    if code:
        last = " ".join((nccl.ncclGetLastError(None) or b"").decode(errors="replace").split())
        raise Failed(f"{call}: {nccl.ncclGetErrorString(code).decode()}" + (f" ({last})" if last else ""))


def _driven(code: int, call: str) -> None:
    if code:
        message = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(message))
        raise Failed(f"{call}: {(message.value or b'an unknown error').decode()} (CUDA error {code})")
