"""What a rank measures by itself: products of matrices on its cores, and copies of memory.

numpy only, which ranks of trainers and of programs have. Each figure is the best of a few slices: a moment of other
load does not count, a slow node is slow in all of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

SLICES = 4
COMPUTE_SECONDS, COPY_SECONDS = 1.0, 0.4
"""Of all slices together."""
SIDE, BATCH = 64, 32
"""Of the matrices. OpenBLAS multiplies matrices of up to 64 x 64 x 64 in the calling thread, so the number of threads
is this module's, whatever the library's own."""
COPY_BYTES = 32 << 20
"""More than most caches hold."""


def compute_rate(cores: int) -> float:
    """Products of matrices in float32 on so many cores, in GFLOP/s."""
    generator = np.random.default_rng(0)
    operands = [generator.random((2, BATCH, SIDE, SIDE), dtype=np.float32) for _ in range(cores)]
    results = [np.empty((BATCH, SIDE, SIDE), np.float32) for _ in range(cores)]

    def work(core: int) -> Callable[[], object]:
        first, second = operands[core]
        return lambda: np.matmul(first, second, out=results[core])

    counts = _best([work(core) for core in range(cores)], COMPUTE_SECONDS)
    return counts * BATCH * 2 * SIDE**3 / 1e9


def copy_rate() -> float:
    """Copies of memory, in GB/s read, and as many written."""
    source, target = np.ones(COPY_BYTES, np.uint8), np.zeros(COPY_BYTES, np.uint8)
    return _best([lambda: np.copyto(target, source)], COPY_SECONDS) * COPY_BYTES / 1e9


def _best(work: list[Callable[[], object]], seconds: float) -> float:
    """Calls per second of all functions together, each in a thread, in the best slice."""
    for call in work:
        call()  # pages are mapped, and libraries started
    return max(_slice(work, seconds / SLICES) for _ in range(SLICES))


def _slice(work: list[Callable[[], object]], seconds: float) -> float:
    counts: list[float] = [0.0] * len(work)

    def repeat(place: int) -> None:
        begun, count = time.perf_counter(), 0
        while (passed := time.perf_counter() - begun) < seconds or count == 0:
            work[place]()
            count += 1
        counts[place] = count / passed if passed > 0 else 0.0

    threads = [threading.Thread(target=repeat, args=(place,)) for place in range(1, len(work))]
    for thread in threads:
        thread.start()
    repeat(0)
    for thread in threads:
        thread.join()
    return sum(counts)


def own_figures(cores: int) -> dict[str, Any]:
    """The figures of this rank alone."""
    return {"compute": compute_rate(cores), "copy": copy_rate()}
