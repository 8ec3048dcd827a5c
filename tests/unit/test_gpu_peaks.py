"""The peak of a GPU, by which the MFU of a profile is computed."""

from __future__ import annotations

import pytest

from ortflow.launchers.report.peaks import known_peak


@pytest.mark.parametrize(
    ("device", "precision", "speed"),
    [
        ("NVIDIA H200", "fp32", 67e12),
        ("NVIDIA H200, BF16", "bf16", 989e12),
        ("NVIDIA H100 80GB HBM3, TF32", "tf32", 494e12),
        ("NVIDIA A100-SXM4-80GB, BF16", "bf16", 312e12),
    ],
)
def test_the_peak_is_that_of_the_whole_name(device: str, precision: str, speed: float) -> None:
    assert known_peak(device, precision, 2) == (
        2 * speed,
        f"{precision} of {device.partition(',')[0].removeprefix('NVIDIA ')} by NVIDIA's data sheet",
    )


@pytest.mark.parametrize(
    "device",
    ["NVIDIA H200 NVL", "NVIDIA GH200 480GB", "NVIDIA RTX A1000", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "cpu", ""],
)
def test_another_gpu_with_a_similar_name_has_no_peak(device: str) -> None:
    assert known_peak(device, "bf16", 1) is None
