"""Which GPU a rank uses, and one sentence for each reason why it has none."""

from __future__ import annotations

import pytest
from fake_cuda import FakeCuda
from messages import mentions
from run_files import spec_of

from ortflow.launchers.doctor.gpu import examine_gpu
from ortflow.launchers.findings import Level
from ortflow.workflow.device.choice import cuda_runtime, local_gpu, open_device
from ortflow.workflow.device.cpu import CpuDevice
from ortflow.workflow.device.cudart import Runtime
from ortflow.workflow.errors import OrtflowError, UserError
from ortflow.workflow.onnx_runtime import onnxruntime
from ortflow.workflow.ranks import Place

HERE = Place(0, 1, 0, 1, "none", "n1")
HAS_CUDA = "CUDAExecutionProvider" in onnxruntime.get_available_providers()


def test_a_run_without_gpus_asks_no_driver() -> None:
    assert isinstance(open_device(spec_of(), HERE), CpuDevice)


@pytest.mark.parametrize(("visible", "local_rank", "taken"), [(1, 0, 0), (1, 3, 0), (4, 3, 3), (2, 3, 1)])
def test_ranks_of_a_node_take_turns_over_what_they_see(visible: int, local_rank: int, taken: int) -> None:
    gpu = local_gpu(Runtime(FakeCuda(visible)), local_rank, "n1", {})
    assert (gpu.index, gpu.name, gpu.capability) == (taken, "NVIDIA Fake", (9, 0))
    assert gpu.uuid == f"{taken:02x}" * 16


def refusal(library: FakeCuda, **environment: str) -> OrtflowError:
    with pytest.raises(OrtflowError) as caught:
        local_gpu(Runtime(library), 0, "n1", environment)
    return caught.value


@pytest.mark.parametrize(
    ("library", "environment", "said", "code"),
    [
        (FakeCuda(failing={"cudaGetDeviceCount": 100}), {}, "n1 has no NVIDIA GPU", 2),
        (FakeCuda(0), {}, "n1 has no NVIDIA GPU", 2),
        (
            FakeCuda(failing={"cudaGetDeviceCount": 100}),
            {"CUDA_VISIBLE_DEVICES": "NoDevFiles"},
            "n1 … no GPU … CUDA_VISIBLE_DEVICES is 'NoDevFiles'",
            2,
        ),
        (
            FakeCuda(driver=12080, failing={"cudaGetDeviceCount": 35}),
            {},
            "n1 … CUDA 12.8 … 13.0",
            2,
        ),
        (FakeCuda(driver=0, failing={"cudaGetDeviceCount": 35}), {}, "n1 has no NVIDIA driver", 2),
        (FakeCuda(failing={"cudaSetDevice": 46}), {}, "n1 … in use by another process", 1),
        (FakeCuda(failing={"cudaSetDevice": 214}), {}, "error 214 (CUDA error 214)", 1),
    ],
)
def test_each_reason_is_one_sentence(library: FakeCuda, environment: dict[str, str], said: str, code: int) -> None:
    error = refusal(library, **environment)
    assert mentions(str(error), said)
    assert error.exit_code == code
    assert not isinstance(error, UserError) or error.where == "resources.gpus_per_rank"


@pytest.mark.skipif(HAS_CUDA, reason="is about a package without CUDA")
def test_a_package_without_cuda_is_named() -> None:
    with pytest.raises(UserError, match=r"resources\.gpus_per_rank.*has no CUDA"):
        cuda_runtime()


def test_an_interpreter_that_cannot_look_is_a_fault() -> None:
    for python in ("true", "/nowhere/python"):
        assert [one.level for one in examine_gpu(python, 1)] == [Level.FAULT]
