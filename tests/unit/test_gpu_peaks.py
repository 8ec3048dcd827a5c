"""The peak of a GPU, by which the MFU of a profile is computed."""

from __future__ import annotations

import pytest

from ortflow.launchers.report.peaks import known_peak


@pytest.mark.parametrize(
    ("device", "precision", "speed", "name"),
    [
        ("NVIDIA H200", "fp32", 67e12, "H200"),
        ("NVIDIA H200, BF16", "bf16", 989e12, "H200"),
        ("NVIDIA H200 NVL, BF16", "bf16", 835e12, "H200 NVL"),
        ("NVIDIA H100 80GB HBM3, TF32", "tf32", 494.5e12, "H100"),
        ("NVIDIA H100 PCIe, FP16", "fp16", 756e12, "H100 PCIe"),
        ("NVIDIA A100-SXM4-80GB, TF32", "tf32", 156e12, "A100-SXM"),
        ("NVIDIA L40S", "fp32", 91.6e12, "L40S"),
    ],
)
def test_the_peak_is_that_of_the_data_sheet(device: str, precision: str, speed: float, name: str) -> None:
    assert known_peak(device, precision, 2) == (2 * speed, f"{precision} of {name} by NVIDIA's data sheet")


@pytest.mark.parametrize(
    "device",
    ["NVIDIA RTX A1000", "NVIDIA GH200 480GB", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "Tesla T4", "cpu", ""],
)
def test_another_gpu_with_a_similar_name_has_no_peak(device: str) -> None:
    assert known_peak(device, "bf16", 1) is None
