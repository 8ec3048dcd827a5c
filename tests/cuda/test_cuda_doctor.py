"""The doctor on a real GPU: products and sums are right, a sound GPU is above its floor and has no other finding.

With several GPUs visible, the sum over them is tested too.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from ortflow.launchers.doctor.gpu import examine_gpu, from_report
from ortflow.launchers.findings import Level
from ortflow.workflow.comm.nccl_library import load
from ortflow.workflow.device.cuda import CudaDevice
from ortflow.workflow.device.cudart import Runtime
from ortflow.workflow.device.floors import floor, link_floor
from ortflow.workflow.device.nvml import open_nvml
from ortflow.workflow.runtime_check.gpu_sum import add_up

MANY = 8


@pytest.fixture(scope="module")
def report(cuda: Runtime) -> dict[str, Any]:
    """The report from a process of its own, as the doctor makes it."""
    done = subprocess.run(
        [sys.executable, "-m", "ortflow.workflow.runtime_check.gpu_report", str(MANY)],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps(found, indent=1))
    return found


def test_every_gpu_is_tried(cuda: Runtime, report: dict[str, Any]) -> None:
    assert len(report["gpus"]) == min(cuda.count(), MANY)
    assert not any("error" in gpu for gpu in report["gpus"]), report


@pytest.mark.parametrize("kind", ["fp32", "fp16"])
def test_a_sound_gpu_is_above_its_floor_and_below_its_data_sheet(report: dict[str, Any], kind: str) -> None:
    for gpu in report["gpus"]:
        least = floor(gpu["name"], kind)
        speed = gpu[kind] / 1e12
        print(f"{gpu['name']}: {kind} {speed:.1f} TFLOP/s, floor {least}, slowed {gpu.get('slowed')}")
        if least is not None:
            # Floors are at least a quarter of the data sheet.
            assert least <= speed <= 4 * least, gpu


def test_nvml_reports_the_gpu(report: dict[str, Any]) -> None:
    if open_nvml() is None:
        pytest.skip("no NVML here")
    for gpu in report["gpus"]:
        assert 10 <= gpu["temperature"] <= 100, gpu
        assert gpu.get("uncorrected", 0) == 0, gpu


def test_the_doctor_reports_no_fault(cuda: Runtime, report: dict[str, Any]) -> None:
    print(*from_report(report, cuda.count()), sep="\n")
    found = [*examine_gpu(sys.executable, 1)]
    assert [one.level for one in found if one.level is Level.FAULT] == [], found
    assert "a product of matrices in fp16" in found[0].what


def test_a_gpu_in_use_is_reported(cuda: Runtime) -> None:
    """This process holds a fifth of its memory while another one checks it."""
    device = CudaDevice(cuda, cuda.describe(0))
    held = device.allocate(device.gpu.total // 5 // 4, "float32")
    found = [str(one) for one in examine_gpu(sys.executable, 1)]
    assert held.count > 0
    assert any("is in use:" in one for one in found), found


def test_the_sum_over_gpus(cuda: Runtime, report: dict[str, Any]) -> None:
    if cuda.count() < 2:
        pytest.skip("needs two GPUs")
    assert "error" not in report["sum"], report["sum"]
    assert report["sum"]["gbps"] >= link_floor(report["gpus"][0]["name"]), report["sum"]
    library = load()
    assert library is not None
    devices = [CudaDevice(cuda, cuda.describe(index)) for index in range(cuda.count())]
    for count in (1, 1000, 1 << 20):
        assert add_up(library, devices, count)["gbps"] > 0
