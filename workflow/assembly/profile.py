"""Measures the nodes of a graph with ONNX Runtime's profiler. Runs in the process of `child`."""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

REPEATS = 10
"""Runs, at most. The smallest time of each node counts."""
ENOUGH = 2.0
"""Seconds after which no further run begins."""
LIMIT = 60.0
"""Seconds after which the first run is given up."""
_POOL = 1 << 24
"""Elements at least that random weights are taken from, 64 MiB: more than caches hold."""
_MARK = "_kernel_time"


def profile(model: bytes, feeds: Mapping[str, npt.NDArray[Any]], weights: Mapping[str, list[int]], threads: int) -> Any:
    """Seconds of each node, by its name; of nodes within other nodes, too.

    Parameters
    ----------
    model
        The graph, whose nodes have unique names.
    feeds
        Its inputs, except for the weights.
    weights
        fp32 inputs -> their shapes. They are filled with random values that share memory, so that a model larger than
        this process may become can be measured.
    threads
        Cores to use.
    """
    from ortflow.workflow.onnx_runtime import onnxruntime

    with tempfile.TemporaryDirectory(prefix="ortflow-profile-") as folder:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.log_severity_level = 4
        # A node that was fused with another one would have no time of its own.
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.enable_mem_pattern = options.enable_mem_reuse = False
        options.add_session_config_entry("session.set_denormal_as_zero", "1")
        options.enable_profiling, options.profile_file_prefix = True, str(Path(folder, "run"))
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        arrays = {**feeds, **_random(weights)}
        run = onnxruntime.RunOptions()
        run.log_severity_level = 4
        timer = threading.Timer(LIMIT, setattr, (run, "terminate", True))
        timer.daemon = True
        timer.start()
        start = time.perf_counter()
        for _ in range(REPEATS):
            session.run(None, arrays, run)
            timer.cancel()
            if time.perf_counter() - start > ENOUGH:
                break
        return _fastest(Path(session.end_profiling()))


def _random(weights: Mapping[str, list[int]]) -> dict[str, npt.NDArray[np.float32]]:
    """Vectors around 1, as scales and variances are; matrices around 0."""
    random = np.random.default_rng(0)
    counts = {name: int(np.prod(shape, dtype=np.int64)) for name, shape in weights.items()}
    pool = random.random(max(0, *counts.values(), min(_POOL, sum(counts.values()))), np.float32)
    vectors, matrices = 0.5 + pool[: max((counts[n] for n, s in weights.items() if len(s) < 2), default=0)], pool
    matrices -= 0.5
    matrices *= 0.1
    arrays, start = {}, 0
    for name, shape in weights.items():
        count = counts[name]
        if len(shape) < 2:
            arrays[name] = vectors[:count].reshape(shape)
            continue
        if start + count > len(matrices):
            start = 0
        arrays[name] = matrices[start : start + count].reshape(shape)
        start += count
    return arrays


def _fastest(path: Path) -> dict[str, float]:
    fastest: dict[str, float] = {}
    for event in json.loads(path.read_text(encoding="utf-8", errors="replace")):
        name = str(event.get("name", ""))
        if event.get("cat") == "Node" and name.endswith(_MARK):
            name, seconds = name.removesuffix(_MARK), 1e-6 * float(event["dur"])
            fastest[name] = min(seconds, fastest.get(name, seconds))
    return fastest
