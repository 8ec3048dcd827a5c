"""The greatest speed of GPUs, as NVIDIA's data sheets state it. Pure."""

from __future__ import annotations

from collections.abc import Mapping

_HOPPER_SXM = {"bf16": 989e12, "fp16": 989e12, "tf32": 494e12, "fp32": 67e12}
_A100 = {"bf16": 312e12, "fp16": 312e12, "tf32": 156e12, "fp32": 19.5e12}
PEAKS: Mapping[str, Mapping[str, float]] = {
    "H200": _HOPPER_SXM,
    "H100 80GB HBM3": _HOPPER_SXM,
    "H100 PCIe": {"bf16": 756e12, "fp16": 756e12, "tf32": 378e12, "fp32": 51e12},
    "A100-SXM4-40GB": _A100,
    "A100-SXM4-80GB": _A100,
    "A100-PCIE-40GB": _A100,
    "A100 80GB PCIe": _A100,
    "L40S": {"bf16": 362e12, "fp16": 362e12, "tf32": 183e12, "fp32": 91.6e12},
}
"""The driver's name of a GPU -> operations a second by precision, without sparsity.

Whole names: the H200 NVL, the RTX A1000 and the parts of a GPU that MIG makes have other speeds than what their names
begin with.
"""


def known_peak(device: str, precision: str, count: int) -> tuple[float, str] | None:
    """Operations a second of so many devices, and what that is; None if it is not known here.

    `device` is a GPU's name, perhaps with the precision of its products behind a comma, as the environment records it.
    """
    name = device.partition(",")[0].removeprefix("NVIDIA ")
    speed = PEAKS.get(name, {}).get(precision)
    return None if speed is None else (speed * count, f"{precision} of {name} by NVIDIA's data sheet")
