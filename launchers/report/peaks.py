"""The greatest speed of devices whose makers state it. Pure."""

from __future__ import annotations

from collections.abc import Mapping

PEAKS: Mapping[str, Mapping[str, float]] = {
    "H200": {"bf16": 989e12, "fp16": 989e12, "tf32": 494e12, "fp32": 67e12},
    "H100 80GB HBM3": {"bf16": 989e12, "fp16": 989e12, "tf32": 494e12, "fp32": 67e12},
    "H100 PCIe": {"bf16": 756e12, "fp16": 756e12, "tf32": 378e12, "fp32": 51e12},
    "A100": {"bf16": 312e12, "fp16": 312e12, "tf32": 156e12, "fp32": 19.5e12},
}
"""Part of a GPU's name -> operations a second by precision, without sparsity; from NVIDIA's data sheets."""


def known_peak(device: str, precision: str, count: int) -> tuple[float, str] | None:
    """Operations a second of so many devices, and what that is; None if the maker's number is not known here."""
    for name, peaks in PEAKS.items():
        if name in device and precision in peaks and "MIG" not in device:
            return peaks[precision] * count, f"{precision} of {name} by NVIDIA's data sheet"
    return None
