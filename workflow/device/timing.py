"""Times work of a GPU that takes less than queueing it from Python: as a CUDA graph of many repetitions."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from ortflow.workflow.device.capture import captured
from ortflow.workflow.device.cudart import CudaError, Runtime


def seconds_of(runtime: Runtime, stream: int, queue: Callable[[], None], rounds: int) -> float:
    """Seconds of one run of what `queue` queues on a stream, from `rounds` runs.

    Waits for the stream. What cannot be captured is timed as it is queued. Raises what `queue` and CUDA do then.
    """
    # Measured from the host, which takes longer to start small kernels than they run, chance decided which of cuDNN's
    # algorithms was the fastest: 0.5 ms of a step of ResNet-50 (docs/benchmarks.md).
    graph = executable = 0
    try:
        graph = captured(runtime, stream, lambda: _repeat(queue, rounds))
        executable = runtime.instantiate(graph)
        # The first launch takes longer: it sends the graph to the GPU.
        _timed(runtime, stream, lambda: runtime.launch(executable, stream))
        return _timed(runtime, stream, lambda: runtime.launch(executable, stream)) / rounds
    except Exception:  # noqa: BLE001 - a library's errors are only defined in its package
        return _timed(runtime, stream, lambda: _repeat(queue, rounds)) / rounds
    finally:
        if graph:
            with contextlib.suppress(CudaError):
                runtime.forget_graph(graph, executable)


def _repeat(queue: Callable[[], None], rounds: int) -> None:
    for _ in range(rounds):
        queue()


def _timed(runtime: Runtime, stream: int, do: Callable[[], None]) -> float:
    runtime.wait(stream)
    begun = time.perf_counter()
    do()
    runtime.wait(stream)
    return time.perf_counter() - begun
