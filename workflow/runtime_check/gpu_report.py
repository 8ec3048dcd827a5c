"""Reports this machine's GPUs as JSON: `python -m ortflow.workflow.runtime_check.gpu_report RANKS`.

Run by `ortflow doctor` with the ranks' interpreter. On each GPU that a rank would use, matrix products in fp32 and
fp16, through the sessions and buffers of training, are compared with the CPU's; several GPUs compute a sum over NCCL.
Before that, the management library is queried for processes that use the GPUs.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from ortflow.workflow.comm.nccl_library import load
from ortflow.workflow.device.choice import cuda_runtime, local_gpu
from ortflow.workflow.device.cuda import CudaDevice
from ortflow.workflow.device.cudart import Gpu, Runtime
from ortflow.workflow.device.nvml import Nvml, open_nvml
from ortflow.workflow.errors import OrtflowError, UserError
from ortflow.workflow.runtime_check.gpu_sum import add_up
from ortflow.workflow.system.runtimes import installed_runtime

WIDTH = {"float32": 4096, "float16": 8192}
"""Rows and columns of the matrices: their product keeps a GPU busy for more than a millisecond."""
ROUNDS = 8
CHECKED = 16
"""Rows and columns of the part of the product that is also computed on the CPU."""
TOLERANCE = {"float32": 1e-5, "float16": 1e-2}
"""Largest error of a product of standard normal numbers, divided by the square root of the width."""
TILE = 2048
"""Rows and columns of the random block that the matrices repeat."""


def report_gpus(ranks: int = 1) -> dict[str, Any]:
    """Package, driver, and properties and performance of each GPU that `ranks` ranks would use.

    `error` and `fix` are in the report if no GPU can be used, or in the entry of a GPU that fails.
    """
    from ortflow.workflow.onnx_runtime import onnxruntime

    report: dict[str, Any] = {"package": f"{installed_runtime()} {onnxruntime.__version__}"}
    nvml = open_nvml()
    users = nvml.users() if nvml is not None else {}
    try:
        cuda = cuda_runtime()
        first = local_gpu(cuda, 0, socket.gethostname(), os.environ)
        count = cuda.count()
        report |= {"driver": cuda.driver(), "runtime": cuda.version(), "count": count}
        gpus = [first, *(cuda.describe(index) for index in range(1, min(count, ranks)))]
    except UserError as error:
        return report | {"error": f"{error.where}: {error.what}" if error.where else error.what, "fix": error.fix}
    except OrtflowError as error:
        return report | {"error": str(error)}
    report["gpus"] = [_with_health(gpu, nvml, users) for gpu in gpus]
    for entry, gpu in zip(report["gpus"], gpus, strict=True):
        # CUDA's current device is per thread, and CudaDevice sets it once.
        with ThreadPoolExecutor(1) as thread:
            entry |= thread.submit(_tried, cuda, gpu, nvml).result()
    if len(gpus) > 1 and not any("error" in entry for entry in report["gpus"]):
        report["sum"] = _sum(cuda, gpus)
    return report


def _with_health(gpu: Gpu, nvml: Nvml | None, users: Mapping[str, int]) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": gpu.name, "capability": gpu.capability, "free": gpu.free, "total": gpu.total}
    entry["processes"] = users.get(gpu.uuid, 0)
    return entry | (nvml.health(gpu.uuid) if nvml is not None else {})


def _tried(cuda: Runtime, gpu: Gpu, nvml: Nvml | None) -> dict[str, Any]:
    """The products on one GPU, and the reasons for reduced clocks during them."""
    try:
        device = CudaDevice(cuda, gpu)
        if nvml is None:
            return {"fp32": product(device, "float32"), "fp16": product(device, "float16")}
        with nvml.watched(gpu.uuid) as slowdowns:
            speeds = {"fp32": product(device, "float32"), "fp16": product(device, "float16")}
        return {**speeds, "slowed": slowdowns[0]}
    except OrtflowError as error:
        return {"error": str(error)}


def product(device: CudaDevice, kind: str) -> float:
    """Floating-point operations per second of a `float32` or `float16` product. Raises OrtflowError if it is wrong."""
    import onnx
    from onnx import TensorProto, helper

    from ortflow.workflow.sessions.binding import Binding
    from ortflow.workflow.sessions.session import Sessions

    width = WIDTH[kind]
    element = TensorProto.FLOAT if kind == "float32" else TensorProto.FLOAT16
    values = [helper.make_tensor_value_info(name, element, [width, width]) for name in ("a", "b", "c")]
    graph = helper.make_graph([helper.make_node("MatMul", ["a", "b"], ["c"])], "product", values[:2], values[2:])
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    binding = Binding(Sessions(device, 1, "error").open(model.SerializeToString()), device)
    random, repeats = np.random.default_rng(0), -(-width // TILE)
    tiles = [random.standard_normal((min(TILE, width),) * 2, np.float32).astype(kind) for _ in range(2)]
    a, b = (np.ascontiguousarray(np.tile(tile, (repeats, repeats))[:width, :width]) for tile in tiles)
    c = device.allocate(width * width, kind)
    binding.feed("a", a)
    binding.feed("b", b)
    binding.write_to("c", c, (width, width))
    binding.run()
    seconds = []
    for _ in range(ROUNDS):
        device.synchronize()
        start = time.perf_counter()
        binding.run()
        device.synchronize()
        seconds.append(time.perf_counter() - start)
    gpu_part = c.slice(0, CHECKED * width).read().reshape(CHECKED, width)[:, :CHECKED].astype(np.float64)
    cpu_part = a[:CHECKED].astype(np.float64) @ b[:, :CHECKED].astype(np.float64)
    apart = float((np.abs(gpu_part - cpu_part) / width**0.5).max())
    if not apart <= TOLERANCE[kind]:
        raise OrtflowError(f"a matrix product in {kind} on {device.name} is wrong by {apart:.2g}")
    return 2 * width**3 / statistics.median(seconds)


def _sum(cuda: Runtime, gpus: Sequence[Gpu]) -> dict[str, Any]:
    library = load()
    if library is None:
        return {"missing": True}
    try:
        devices = [CudaDevice(cuda, gpu) for gpu in gpus]
        return dict(add_up(library, devices))
    except OrtflowError as error:
        return {"error": str(error)}


if __name__ == "__main__":
    print(json.dumps(report_gpus(*map(int, sys.argv[1:2]))))
    sys.exit(0)
