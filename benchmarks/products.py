"""Time of single matrix products on the CPU: ortflow's kernel against PyTorch.

    python benchmarks/products.py [--threads 1 --rounds 15]

The shapes are a small GPT's, GPT-2's and square ones; fp32, the second factor as it lies or turned. Results have to
agree. Both take turns, because a machine's speed drifts. Prints medians in GFLOP/s and the median of the rounds' ratios
of times.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import onnxruntime
import torch
from onnx import TensorProto, helper

from ortflow.workflow.graph.domains import CPU_DOMAIN
from ortflow.workflow.kernels.library import find_library

SHAPES = (
    (1024, 256, 256), (1024, 1024, 256), (1024, 256, 1024),
    (4096, 768, 768), (4096, 3072, 768), (4096, 768, 3072), (768, 768, 4096),
    (256, 256, 256), (512, 512, 512), (1024, 1024, 1024), (2048, 2048, 2048),
)  # fmt: skip
"""Rows, columns, depth."""
TOLERANCE = 1e-5
"""Of a result, to its largest element."""


def session_of(turned: bool, threads: int) -> onnxruntime.InferenceSession:
    """One node Product."""
    flags = {"turn_a": 0, "turn_b": int(turned), "view_a": 0, "view_b": 0, "view_y": 0, "alpha": 1.0}
    node = helper.make_node("Product", ["a", "b"], ["y"], domain=CPU_DOMAIN, **flags)
    a, b, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, None]) for name in "aby")
    imports = [helper.make_opsetid("", 18), helper.make_opsetid(CPU_DOMAIN, 1)]
    model = helper.make_model(helper.make_graph([node], "product", [a, b], [y]), opset_imports=imports, ir_version=9)
    library = find_library()
    if library.path is None:
        raise SystemExit(library.note)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.register_custom_ops_library(str(library.path))
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def main() -> None:
    """Measure each shape, print a line for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    random = np.random.default_rng(0)
    print(f"{'rows x columns x depth':24} {'ortflow':>8} {'torch':>8}  GFLOP/s; time of ortflow / torch")
    for m, n, k in SHAPES:
        for turned in (False, True):
            session = session_of(turned, options.threads)
            a = random.standard_normal((m, k), np.float32)
            b = random.standard_normal((n, k) if turned else (k, n), np.float32)
            x, w = torch.from_numpy(a), torch.from_numpy(b.T if turned else b)
            y, out = np.empty((m, n), np.float32), torch.empty(m, n)
            binding = session.io_binding()
            binding.bind_cpu_input("a", a)
            binding.bind_cpu_input("b", b)
            binding.bind_output("y", "cpu", 0, np.float32, [m, n], y.ctypes.data)
            ours, peer = [], []
            for _ in range(options.rounds + 1):
                start = time.perf_counter()
                session.run_with_iobinding(binding)
                between = time.perf_counter()
                torch.mm(x, w, out=out)
                ours.append(between - start)
                peer.append(time.perf_counter() - between)
            if np.abs(y - out.numpy()).max() > TOLERANCE * np.abs(y).max():
                raise SystemExit(f"the products of {m} x {n} x {k} differ")
            work = 2e-9 * m * n * k
            speeds = [work / statistics.median(times[1:]) for times in (ours, peer)]
            ratio = statistics.median(mine / theirs for mine, theirs in zip(ours[1:], peer[1:], strict=True))
            name = f"{m} x {n} x {k}{' turned' if turned else ''}"
            print(f"{name:24} {speeds[0]:8.0f} {speeds[1]:8.0f}  {ratio:.2f}")


if __name__ == "__main__":
    main()
