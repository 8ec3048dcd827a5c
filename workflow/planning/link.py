"""The program of two ranks that measure how fast they exchange: `python -m ortflow.workflow.planning.link`.

Rank 0 prints bandwidth and latency as JSON. Started by `launchers.link`.
"""

from __future__ import annotations

import json
import time

import numpy as np

from ortflow.workflow.comm.mpi import MpiCommunicator
from ortflow.workflow.device.cpu import CpuDevice

ELEMENTS = 1 << 21
"""Of the large buffer, 8 MiB."""
REPEATS, MANY = 5, 50
"""All-reduces of the large and of the small buffer."""


def main() -> None:
    """See the module."""
    world, device = MpiCommunicator(), CpuDevice()
    large, small = device.allocate(ELEMENTS, np.float32), device.allocate(1, np.float32)
    seconds = []
    # The first is several times slower than the others (MPICH 5.0.2 in shared memory), and other processes slow single
    # ones: the least of the others counts.
    for _ in range(1 + REPEATS):
        world.barrier()
        start = time.perf_counter()
        world.all_reduce(large)
        seconds.append(time.perf_counter() - start)
    world.barrier()
    start = time.perf_counter()
    for _ in range(MANY):
        world.all_reduce(small)
    # A ring of n ranks takes 2 (n-1) messages, and each rank sends 2 (n-1)/n of the buffer.
    ranks = world.world_size
    latency = (time.perf_counter() - start) / MANY / (2 * (ranks - 1))
    bandwidth = 2 * (ranks - 1) / ranks * ELEMENTS * 4 / min(seconds[1:])
    if world.rank == 0:
        print(json.dumps({"bandwidth": bandwidth, "latency": latency}), flush=True)
    world.close()


if __name__ == "__main__":
    main()
