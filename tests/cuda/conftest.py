"""On a machine with an NVIDIA GPU and `ortflow[cuda]`: pytest tests/cuda. Skipped elsewhere."""

from __future__ import annotations

import pytest

from ortflow.workflow.device.choice import cuda_runtime
from ortflow.workflow.device.cuda import CudaDevice
from ortflow.workflow.device.cudart import CudaError, Runtime
from ortflow.workflow.errors import OrtflowError


@pytest.fixture(scope="session")
def cuda() -> Runtime:
    try:
        found = cuda_runtime()
        if found.count():
            return found
    except (OrtflowError, CudaError) as error:
        pytest.skip(f"needs a GPU: {error}")
    pytest.skip("needs a GPU: this machine has none")


@pytest.fixture(scope="session")
def device(cuda: Runtime) -> CudaDevice:
    return CudaDevice(cuda, cuda.describe(0))
