"""What the GPUs of this machine are to a rank: printed as JSON by `python -m ortflow.workflow.gpu_report`.

Run by `ortflow doctor` with the ranks' interpreter. A real product of matrices, through the sessions and buffers that
ranks train with, is compared with the CPU's.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
import time
from typing import Any

import numpy as np

from ortflow.workflow.device.choice import cuda_runtime, local_gpu
from ortflow.workflow.device.cuda import CudaDevice
from ortflow.workflow.errors import OrtflowError, UserError
from ortflow.workflow.runtimes import installed_runtime

WIDTH = 4096
"""Rows and columns of the matrices."""
ROUNDS = 8
CHECKED = 16
"""Rows that are computed on the CPU, too."""
TOLERANCE = 1e-5
"""Of a product of standard normal numbers, divided by the root of the width."""


def look() -> dict[str, Any]:
    """Package, driver, devices and the product; `error` and `fix` where something is wrong."""
    from ortflow.workflow.onnx_runtime import onnxruntime

    report: dict[str, Any] = {"package": f"{installed_runtime()} {onnxruntime.__version__}"}
    try:
        cuda = cuda_runtime()
        gpu = local_gpu(cuda, 0, socket.gethostname(), os.environ)
        report |= {"driver": cuda.driver(), "runtime": cuda.version(), "count": cuda.count()}
        report |= {"name": gpu.name, "capability": gpu.capability, "free": gpu.free, "total": gpu.total}
        report |= product(CudaDevice(cuda, gpu))
    except UserError as error:
        report |= {"error": f"{error.where}: {error.what}" if error.where else error.what, "fix": error.fix}
    except OrtflowError as error:
        report["error"] = str(error)
    return report


def product(device: CudaDevice) -> dict[str, float]:
    """Floating-point operations a second of a product in fp32, and how far it is from the CPU's."""
    import onnx
    from onnx import TensorProto, helper

    from ortflow.workflow.trainer.sessions import Binding, Sessions

    shape = [WIDTH, WIDTH]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("a", "b", "c")]
    graph = helper.make_graph([helper.make_node("MatMul", ["a", "b"], ["c"])], "product", values[:2], values[2:])
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    binding = Binding(Sessions(device, 1, "error").open(model.SerializeToString()), device)
    random = np.random.default_rng(0)
    a, b = (random.standard_normal(shape, np.float32) for _ in range(2))
    c = device.allocate(WIDTH * WIDTH, np.float32)
    binding.feed("a", a)
    binding.feed("b", b)
    binding.write_to("c", c, (WIDTH, WIDTH))
    binding.run()
    seconds = []
    for _ in range(ROUNDS):
        device.synchronize()
        start = time.perf_counter()
        binding.run()
        device.synchronize()
        seconds.append(time.perf_counter() - start)
    found = c.slice(0, CHECKED * WIDTH).read().reshape(CHECKED, WIDTH)
    apart = np.abs(found - a[:CHECKED].astype(np.float64) @ b) / WIDTH**0.5
    if not float(apart.max()) <= TOLERANCE:
        raise OrtflowError(f"a product of matrices on {device.name} is wrong by {float(apart.max()):.2g}")
    return {"flops": 2 * WIDTH**3 / statistics.median(seconds), "apart": float(apart.max())}


if __name__ == "__main__":
    print(json.dumps(look()))
    sys.exit(0)
