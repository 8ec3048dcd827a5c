"""The greatest speed of GPUs, as NVIDIA's data sheets state it. Pure."""

from __future__ import annotations

from ortflow.workflow.device.floors import Sheet, sheet

TURING = frozenset({"T4", "RTX 2080 Ti"})
"""GPUs whose tensor cores have neither bf16 nor TF32."""


def known_peak(device: str, precision: str, count: int) -> tuple[float, str] | None:
    """Operations a second of so many devices, without sparsity, and what that is; None if it is not known here.

    `device` is a GPU's name, perhaps with the precision of its products behind a comma, as the environment records it.
    """
    row = sheet(device.partition(",")[0])
    if row is None or "MIG" in device:  # a part of a GPU
        return None
    speed = _speed(row, precision)
    return None if speed is None else (1e12 * speed * count, f"{precision} of {row.name} by NVIDIA's data sheet")


def _speed(row: Sheet, precision: str) -> float | None:
    """TFLOP/s. From Ampere on, bf16 is as fast as fp16, and TF32 half as fast."""
    if precision == "fp32":
        return row.fp32
    if precision == "fp16":
        return row.fp16
    if row.name in TURING:
        return None
    return row.fp16 if precision == "bf16" else row.fp16 / 2
