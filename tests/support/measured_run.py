"""Runs a training graph once and prints by how many bytes the memory in use rose: on the CPU this process' resident
memory at most, on a GPU what its arena and the libraries took and keep.

python measured_run.py FOLDER_OF_GRAPHS KERNELS SHAPES [cuda]     (KERNELS: auto or onnxruntime; SHAPES: JSON, by input)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from ortflow.workflow.device import Device
from ortflow.workflow.device.choice import cuda_runtime
from ortflow.workflow.device.cpu import CpuDevice
from ortflow.workflow.graph.types import LOSS_SUM, LOSS_WEIGHT, SEED, GraphSet
from ortflow.workflow.kernels.library import library_for
from ortflow.workflow.sessions.binding import Binding
from ortflow.workflow.sessions.session import Sessions


def memory(name: str) -> int:
    """VmRSS or VmHWM, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def gpu() -> Device:
    """The first GPU that this process sees."""
    from ortflow.workflow.device.cuda import CudaDevice

    return CudaDevice(cuda_runtime(), cuda_runtime().describe(0))


def main() -> None:
    """See the module's docstring."""
    graphs, shapes = GraphSet.load(Path(sys.argv[1])), json.loads(sys.argv[3])
    on_gpu, random = sys.argv[4:] == ["cuda"], np.random.default_rng(0)
    device: Device = gpu() if on_gpu else CpuDevice()
    library = None if on_gpu else library_for(sys.argv[2])
    sessions = Sessions(device, 1, "error", library.path if library is not None else None)
    binding = Binding(sessions.open_fastest(graphs.train), device)
    parameters, gradients, sums = (device.allocate(n, np.float32) for n in (graphs.index.size, graphs.index.size, 2))
    parameters.write(0.02 * random.standard_normal(graphs.index.size).astype(np.float32))
    gradients.fill(1.0)
    binding.read_tensors(graphs.index, parameters)
    for entry in graphs.index:
        for name in (f"{entry.name}_grad", f"{entry.name}_new"):
            if name in binding.outputs:
                binding.write_to(name, gradients.slice(entry.offset, entry.end), entry.tensor.shape)
    for place, name in enumerate((LOSS_SUM, LOSS_WEIGHT)):
        binding.write_to(name, sums.slice(place, place + 1), ())
    arrays = {given.name: random.integers(0, 10, shapes[given.name]).astype(given.dtype) for given in graphs.inputs} | {
        SEED: np.array([1], np.int64)
    }
    for name, array in arrays.items():
        if name in binding.inputs:
            binding.feed(name, array)
    if on_gpu:
        device.synchronize()
        free = cuda_runtime().describe(0).free
        binding.run()
        print(free - cuda_runtime().describe(0).free)
        return
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    binding.run()
    print(memory("VmHWM") - before)


if __name__ == "__main__":
    main()
