"""Numbers in CUDA source. Pure."""

from __future__ import annotations

import struct


def literal(value: float) -> str:
    """A number of fp32 to the bit."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    return f"__int_as_float(0x{bits:08x})"
