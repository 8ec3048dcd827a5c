"""Structures of CUDA's runtime that its functions take, for ctypes. Only `cudart` uses them."""

from __future__ import annotations

import ctypes


class PitchedPointer(ctypes.Structure):
    """cudaPitchedPtr."""

    _fields_ = (
        ("pointer", ctypes.c_void_p),
        ("pitch", ctypes.c_size_t),
        ("x", ctypes.c_size_t),
        ("y", ctypes.c_size_t),
    )


class CopyNode(ctypes.Structure):
    """cudaMemcpy3DParms."""

    _fields_ = (
        ("source_array", ctypes.c_void_p), ("source_place", ctypes.c_size_t * 3), ("source", PitchedPointer),
        ("target_array", ctypes.c_void_p), ("target_place", ctypes.c_size_t * 3), ("target", PitchedPointer),
        ("extent", ctypes.c_size_t * 3), ("kind", ctypes.c_int),
    )  # fmt: skip


class MemoryHandle(ctypes.Structure):
    """cudaIpcMemHandle_t: passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


class PointerAttributes(ctypes.Structure):
    """cudaPointerAttributes, with room for what later versions add."""

    _fields_ = (
        ("kind", ctypes.c_int), ("device", ctypes.c_int), ("device_pointer", ctypes.c_void_p),
        ("host_pointer", ctypes.c_void_p), ("more", ctypes.c_long * 16),
    )  # fmt: skip
