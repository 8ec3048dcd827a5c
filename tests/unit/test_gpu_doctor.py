"""The doctor's GPU checks: products, sums, floors, health; on a CPU and on fakes of CUDA, NCCL and NVML."""

from __future__ import annotations

from typing import Any

import pytest
from fake_cuda import GIB, FakeCuda, FakeNccl
from messages import mentions, says
from waits import wait_until

from ortflow.launchers.doctor.gpu import from_report
from ortflow.launchers.findings import Finding, Level
from ortflow.workflow.device.cpu import CpuDevice
from ortflow.workflow.device.cuda import CudaDevice
from ortflow.workflow.device.cudart import Runtime
from ortflow.workflow.device.floors import TABLE, floor, link_floor, sheet
from ortflow.workflow.device.nvml import Nvml
from ortflow.workflow.errors import OrtflowError
from ortflow.workflow.runtime_check import gpu_report
from ortflow.workflow.runtime_check.gpu_sum import add_up

H200 = {
    "name": "NVIDIA H200",
    "capability": (9, 0),
    "free": 139 * GIB,
    "total": 140 * GIB,
    "fp32": 5.1e13,
    "fp16": 7e14,
}


def report(*gpus: dict[str, Any], **more: Any) -> dict[str, Any]:
    reported = {"package": "onnxruntime-gpu 1.31.1", "driver": 13020, "runtime": 13000, "count": len(gpus)}
    return {**reported, "gpus": list(gpus), **more}


def wrong(found: list[Finding]) -> list[str]:
    return [f"{one.level.name} {one.about}: {one.what}" for one in found if one.level is not Level.OK]


def test_sound_gpus() -> None:
    found = [*from_report(report(H200, {**H200, "fp32": 5.3e13}, sum={"gbps": 340.0, "nccl": 22803}), 2)]
    assert wrong(found) == []
    first, total = found
    assert says(
        first.what,
        "2 x NVIDIA H200 … 149 GB of 150 GB … CUDA 13.2 … onnxruntime-gpu 1.31.1 for 13.0 "
        "… fp32: 51.0 to 53.0 TFLOP/s … fp16: 700.0 TFLOP/s",
    )
    assert says(total.what, "2 GPUs … 256 MiB … 340 GB/s … NCCL 2.28.3")
    (shared,) = from_report(report(H200), 4)
    assert (shared.level, shared.fix) == (Level.WARNING, "lower resources.ranks_per_node")
    (none,) = from_report({"error": "n1 has no NVIDIA GPU", "fix": "set it to 0"}, 1)
    assert (none.level, none.what, none.fix) == (Level.FAULT, "n1 has no NVIDIA GPU", "set it to 0")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"fp32": 2.0e13, "slowed": 4 | 32},
            "number 1, NVIDIA H200 … 20.0 TFLOP/s in fp32 … 40 or more … heat",
        ),
        (
            {"fp16": 4.0e14, "slowed": 4},
            "WARNING GPU: number 1, NVIDIA H200 … 400.0 TFLOP/s in fp16 … 494 or more … power limit",
        ),
        ({"free": 60 * GIB}, "number 1, NVIDIA H200 … another process, 86 GB"),
        ({"processes": 2}, "number 1, NVIDIA H200 … 2 other processes, 1.1 GB"),
        ({"uncorrected": 3}, "FAULT GPU: number 1, NVIDIA H200 … 3 uncorrected"),
        ({"broken_rows": 1}, "WARNING GPU: number 1, NVIDIA H200 … rows of memory … replaced"),
        ({"error": "a product is wrong by 1"}, "FAULT GPU: number 1, NVIDIA H200 … a product is wrong by 1"),
    ],
)
def test_an_unsound_gpu(change: dict[str, Any], words: str) -> None:
    (reported,) = wrong([*from_report(report(H200, {**H200, **change}), 2)])
    assert mentions(reported, words)


def test_a_gpu_behind_its_neighbours() -> None:
    """Above the floor, or a model without one."""
    for name in ("NVIDIA H200", "NVIDIA Fake"):
        gpus = [{**H200, "name": name, "fp32": speed} for speed in (6e13, 6e13, 6e13, 4.1e13)]
        (reported,) = wrong([*from_report(report(*gpus), 4)])
        assert mentions(reported, f"number 3, {name} … 41.0 TFLOP/s in fp32 … neighbours 60.0")


@pytest.mark.parametrize(
    ("reported", "words"),
    [
        ({"gbps": 100.0, "nccl": 22803}, "WARNING sum over GPUs: … 2 GPUs … 100 GB/s"),
        ({"missing": True}, "WARNING sum over GPUs: … NCCL … not installed"),
        ({"error": "NCCL failed in x: y (z); set A"}, "FAULT sum over GPUs: … NCCL … x … y (z)"),
    ],
)
def test_a_sum_that_is_not_right(reported: dict[str, Any], words: str) -> None:
    (found,) = wrong([*from_report(report(H200, H200, sum=reported), 2)])
    assert says(found, words)


def test_floors_by_the_names_that_cuda_gives() -> None:
    for name, row in {
        "NVIDIA H200": "H200", "NVIDIA H200 NVL": "H200 NVL", "NVIDIA H100 80GB HBM3": "H100",
        "NVIDIA H100 PCIe": "H100 PCIe",
        "NVIDIA A100-SXM4-80GB": "A100-SXM", "NVIDIA A100 80GB PCIe": "A100", "NVIDIA A100-PCIE-40GB": "A100",
        "NVIDIA L4": "L4", "NVIDIA L40S": "L40S", "NVIDIA A10G": "A10G", "NVIDIA A10": "A10", "Tesla T4": "T4",
        "NVIDIA GeForce RTX 4090": "RTX 4090", "NVIDIA RTX A6000": "RTX A6000", "NVIDIA B200": "B200",
        "NVIDIA RTX 6000 Ada Generation": "RTX 6000 Ada",
    }.items():  # fmt: skip
        found = sheet(name)
        assert found is not None, name
        assert found.name == row
    for name in ("NVIDIA Fake", "NVIDIA GeForce GTX 1650", "NVIDIA A4000", "NVIDIA H2000"):
        assert sheet(name) is None, name
        assert floor(name, "fp32") is None
    assert len({row.name for row in TABLE}) == len(TABLE)
    assert floor("NVIDIA H200", "fp32") == pytest.approx(40.2)
    assert floor("Tesla T4", "fp16") == pytest.approx(16.25)
    assert (link_floor("NVIDIA H200"), link_floor("NVIDIA L4"), link_floor("NVIDIA Fake")) == (180.0, 2.0, 2.0)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_report, "WIDTH", {"float32": 96, "float16": 192})
    monkeypatch.setattr(gpu_report, "TILE", 80)


@pytest.mark.parametrize("kind", ["float32", "float16"])
def test_a_product_is_compared(small: None, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    assert gpu_report.product(CpuDevice(), kind) > 0  # type: ignore[arg-type]
    monkeypatch.setattr(gpu_report, "TOLERANCE", {"float32": 1e-12, "float16": 1e-9})
    with pytest.raises(OrtflowError, match=f"{kind} on .* is wrong by "):
        gpu_report.product(CpuDevice(), kind)  # type: ignore[arg-type]


def devices(count: int) -> list[CudaDevice]:
    runtime = Runtime(FakeCuda(count))
    return [CudaDevice(runtime, runtime.describe(index)) for index in range(count)]


def test_a_sum_is_compared() -> None:
    library = FakeNccl()
    reported = add_up(library, devices(3), 5000)
    assert reported["nccl"] == 22803
    assert reported["gbps"] > 0
    assert library.worlds == {}, "the communicators were destroyed"
    with pytest.raises(OrtflowError, match=r"3 GPUs.*number 0"):
        add_up(FakeNccl(wrong=1.0), devices(3), 5000)
    full = FakeNccl(failing={"ncclCommInitAll": 2}, last=b"Error: failed to extend /dev/shm/nccl-x to 9 bytes")
    with pytest.raises(OrtflowError, match=r"ncclCommInitAll.*NCCL_SHM_DISABLE"):
        add_up(full, devices(2), 5000)


class FakeNvml:
    """NVML with one busy, hot GPU; `lacking` are missing functions."""

    def __init__(self, *lacking: str) -> None:
        self.lacking = lacking

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml") and name in object.__getattribute__(self, "lacking"):
            raise AttributeError(name)
        return object.__getattribute__(self, name)

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, place: Any) -> int:  # noqa: N802
        place._obj.value = 5
        return 0 if uuid == b"GPU-00000000-0000-0000-0000-000000000000" else 6

    def nvmlDeviceGetTemperature(self, handle: Any, sensor: int, place: Any) -> int:  # noqa: N802
        place._obj.value = 84
        return 0

    def nvmlDeviceGetTotalEccErrors(self, handle: Any, kind: int, counter: int, place: Any) -> int:  # noqa: N802
        place._obj.value = 2 if (kind, counter) == (1, 0) else 99
        return 0

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Any, place: Any) -> int:  # noqa: N802
        place._obj.value = 32
        return 0

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Any, count: Any, found: Any) -> int:  # noqa: N802
        count._obj.value = 3
        return 0

    def nvmlDeviceGetCount_v2(self, place: Any) -> int:  # noqa: N802
        place._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, place: Any) -> int:  # noqa: N802
        place._obj.value = 5
        return 0 if index == 0 else 4  # NVML_ERROR_NO_PERMISSION

    def nvmlDeviceGetUUID(self, handle: Any, place: Any, size: int) -> int:  # noqa: N802
        place.value = b"GPU-00000000-0000-0000-0000-000000000000"
        return 0

    def nvmlDeviceGetRemappedRows(self, handle: Any, *places: Any) -> int:  # noqa: N802
        places[3]._obj.value = 1
        return 0


def test_health() -> None:
    nvml = Nvml(FakeNvml())
    sound = "0" * 32
    assert nvml.health(sound) == {"temperature": 84, "uncorrected": 2, "broken_rows": 1}
    assert nvml.health("1" * 32) == {}
    assert Nvml(FakeNvml("nvmlDeviceGetRemappedRows", "nvmlDeviceGetTemperature")).health(sound) == {
        "uncorrected": 2,
    }  # fmt: skip
    assert nvml.users() == {sound: 3}
    with nvml.watched(sound, period=0.001) as seen:
        wait_until(lambda: seen != [0])
    assert seen == [32]


def test_a_whole_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three GPUs, two ranks: two are tested, and their sum."""
    library = FakeCuda(3)
    monkeypatch.setattr(gpu_report, "cuda_runtime", lambda: Runtime(library))
    monkeypatch.setattr(gpu_report, "open_nvml", lambda: Nvml(FakeNvml()))
    monkeypatch.setattr(gpu_report, "load", FakeNccl)
    monkeypatch.setattr(gpu_report, "product", lambda device, kind: 1e12 * (2 + device.index))
    monkeypatch.setattr(gpu_report, "add_up", lambda library, made: add_up(library, made, 5000))
    reported = gpu_report.report_gpus(2)
    assert (reported["count"], [gpu["fp32"] for gpu in reported["gpus"]]) == (3, [2e12, 3e12])
    assert [gpu["processes"] for gpu in reported["gpus"]] == [3, 0]
    assert reported["gpus"][0]["uncorrected"] == 2
    assert reported["sum"]["nccl"] == 22803
    assert any("uncorrected" in one for one in wrong([*from_report(reported, 2)]))

    def fail(device: CudaDevice, kind: str) -> float:
        raise OrtflowError("the product is wrong")

    monkeypatch.setattr(gpu_report, "product", fail)
    failed = gpu_report.report_gpus(2)
    assert [gpu["error"] for gpu in failed["gpus"]] == ["the product is wrong"] * 2
    assert "sum" not in failed
