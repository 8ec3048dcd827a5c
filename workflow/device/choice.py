"""Choose the device of a rank, with an error message for each cause of failure.

Called by step `runtime` on every rank, before anything is allocated.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from ortflow.workflow.device import Device
from ortflow.workflow.device.cpu import CpuDevice
from ortflow.workflow.device.cudart import CudaError, Gpu, Runtime, runtime
from ortflow.workflow.device.libraries import major, preload
from ortflow.workflow.errors import OrtflowError, UserError
from ortflow.workflow.ranks import Place
from ortflow.workflow.spec.run import TrainerRunSpec
from ortflow.workflow.system.runtimes import installed_runtime

INSTALL = "pip install 'ortflow[cuda]'"
WHERE = "resources.gpus_per_rank"
VISIBLE = "CUDA_VISIBLE_DEVICES"
TOO_OLD, BUSY, NONE = 35, 46, 100
"""cudaErrorInsufficientDriver, cudaErrorDevicesUnavailable, cudaErrorNoDevice."""


def open_device(spec: TrainerRunSpec, place: Place) -> Device:
    """The device of this rank. Raises UserError or OrtflowError if it has none."""
    if not spec.resources.gpus_per_rank:
        return CpuDevice()
    from ortflow.workflow.device.cuda import CudaDevice

    cuda = cuda_runtime()
    gpu = local_gpu(cuda, place.local_rank, place.host, os.environ)
    try:
        return CudaDevice(cuda, gpu, precision=spec.train.precision)
    except CudaError as error:
        raise explained(error, cuda, place.host, os.environ) from error


def cuda_runtime() -> Runtime:
    """CUDA's runtime; raises UserError if what is installed cannot train on a GPU."""
    from ortflow.workflow.onnx_runtime import onnxruntime

    package = f"{installed_runtime()} {onnxruntime.__version__}"
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers() or not major():
        raise UserError(
            f"asks for GPUs, and {package} has no CUDA",
            where=WHERE,
            fix=f"`pip uninstall -y {installed_runtime()}`, then `{INSTALL}`",
        )
    try:
        return runtime()
    except OSError as error:
        output = preload() or str(error)
        raise UserError(
            f"CUDA {major()} is not installed beside {package} ({output})", where=WHERE, fix=INSTALL
        ) from error


def local_gpu(cuda: Runtime, local_rank: int, host: str, environment: Mapping[str, str]) -> Gpu:
    """The GPU of a rank: where it sees several, the ranks of a node take them in turn.

    Sites show each rank its own GPU or all of its node's.
    """
    try:
        return cuda.describe(local_rank % cuda.count())
    except CudaError as error:
        raise explained(error, cuda, host, environment) from error
    except ZeroDivisionError:
        raise _hidden(host, environment) from None


def explained(error: CudaError, cuda: Runtime, host: str, environment: Mapping[str, str]) -> OrtflowError:
    """The error for a failed CUDA call."""
    if error.code == TOO_OLD:
        driver, required = cuda.driver(), cuda.version()
        if driver == 0:
            return UserError(f"{host} has no NVIDIA driver", where=WHERE, fix="set it to 0 to train on the CPU")
        return UserError(
            f"the driver of {host} supports CUDA {_version(driver)}, and the installed packages need "
            f"{_version(required)}",
            where=WHERE,
            fix="update the driver",
        )
    if error.code == NONE:
        return _hidden(host, environment)
    if error.code == BUSY:
        return OrtflowError(f"the GPU of this rank on {host} is in use by another process ({error.message})")
    return OrtflowError(f"the GPU of this rank on {host} cannot be used: {error.message}")


def _hidden(host: str, environment: Mapping[str, str]) -> UserError:
    visible = environment.get(VISIBLE)
    if visible is not None:
        return UserError(
            f"{host} shows this rank no GPU: {VISIBLE} is {visible!r}",
            where=WHERE,
            fix="set it to a GPU of the machine, or ask the scheduler for GPUs",
        )
    return UserError(f"{host} has no NVIDIA GPU", where=WHERE, fix="set it to 0 to train on the CPU")


def _version(number: int) -> str:
    """13.2 of 13020."""
    return f"{number // 1000}.{number % 1000 // 10}"
