"""What a rank measures on its GPU: products of matrices, by ONNX Runtime, and copies within its memory."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from onnx import TensorProto, helper

from ortflow.workflow.device import Device
from ortflow.workflow.onnx_runtime import onnxruntime

SIDE, PRODUCTS, RUNS = 2048, 20, 5
"""Of the square matrices in float32; in a run of the graph; the best of so many."""
BYTES, COPIES = 256 << 20, 8


def gpu_figures(device: Device) -> dict[str, float]:
    """TFLOP/s of matrix products, and GB/s read (and as many written) of copies within the device's memory."""
    nodes = [helper.make_node("MatMul", [f"p{k}" if k else "x", "w"], [f"p{k + 1}"]) for k in range(PRODUCTS)]
    # The sum alone comes back to the host.
    nodes.append(helper.make_node("ReduceSum", [f"p{PRODUCTS}"], ["y"], keepdims=0))
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [SIDE, SIDE]) for name in ("x", "w")]
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, [])
    graph = helper.make_graph(nodes, "preflight", values, [out])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=device.providers())
    matrix = np.full((SIDE, SIDE), 1.0 / SIDE, np.float32)
    binding = session.io_binding()
    for name in ("x", "w"):
        binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(matrix, device.kind, device.index))
    binding.bind_output("y")
    session.run_with_iobinding(binding)  # libraries are started
    seconds = min(_timed(lambda: session.run_with_iobinding(binding)) for _ in range(RUNS))
    source, target = (device.allocate(BYTES // 4, np.float32) for _ in range(2))

    def copies() -> None:
        for _ in range(COPIES):
            target.copy_from(source)
        target.slice(0, 1).read()  # waits for them

    copies()
    moved = min(_timed(copies) for _ in range(RUNS))
    return {"gpu": PRODUCTS * 2 * SIDE**3 / seconds / 1e12, "gpu_copy": COPIES * BYTES / moved / 1e9}


def _timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun
