"""How fast ranks compute and exchange: measured, or assumed. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ortflow.workflow.graph.stages.balance import BETWEEN_MACHINES, IN_MACHINE

CORE = 25e9
"""Operations a second of one core, in the units of `graph/stages/costs`: an assumption for current processors."""
GPU = 20e12
"""Operations a second of one GPU: an assumption for data-center GPUs."""
MEMORY = 8e9
"""Bytes a second that one core moves: an assumption for current processors."""
GPU_MEMORY = 1e12
"""Bytes a second that one GPU moves: an assumption for data-center GPUs."""
UPDATE = 40
"""Bytes that an update moves per trained element: AdamW reads parameter, gradient and moments and writes three of
them; scaling and norm read the gradient twice and write it once."""
OF_GPUS = 100e9
"""Bytes a second between two GPUs of a machine: an assumption for NVLink."""
LATENCY, NETWORK_LATENCY = 5e-6, 30e-6
"""Seconds of an empty message: assumptions for shared memory, and TCP."""


@dataclass(frozen=True)
class Link:
    """The connection between two ranks."""

    bandwidth: float
    """Bytes per second."""
    latency: float
    """Seconds of an empty message."""

    def send(self, size: float) -> float:
        """Seconds of one message."""
        return size / self.bandwidth + self.latency

    def all_reduce(self, size: float, ranks: int) -> float:
        """Seconds of a ring all-reduce: each rank sends 2 (n-1)/n of the buffer in 2 (n-1) messages (Patarasuk and
        Yuan 2009).
        """
        return 2 * self.shift(size, ranks)

    def shift(self, size: float, ranks: int) -> float:
        """Seconds of a ring reduce-scatter or all-gather of a buffer of this size on each rank."""
        if ranks < 2 or not size:
            return 0.0
        return (ranks - 1) / ranks * size / self.bandwidth + (ranks - 1) * self.latency


@dataclass(frozen=True)
class Rates:
    """Speeds of one rank, and of its links."""

    operations: float
    """Operations a second."""
    update: float
    """Seconds of an update per trained element."""
    inside: Link
    """Between ranks of a machine."""
    outside: Link
    """Between machines."""
    explanations: tuple[str, ...] = ()
    """How they were found, in sentences."""
    measured: bool = False
    """Whether the model may run here to be measured."""


def assumed(threads: int, *, gpu: bool, bandwidth: float | None = None) -> Rates:
    """Rates without a measurement.

    Parameters
    ----------
    threads
        Cores of a rank.
    gpu
        Whether ranks train on GPUs.
    bandwidth
        Bytes per second between machines, if known.
    """
    operations, memory, inside = (GPU, GPU_MEMORY, OF_GPUS) if gpu else (CORE * threads, MEMORY, IN_MACHINE)
    per = "GPU" if gpu else "core"
    explanations = (
        f"Seconds are the operations and bytes of the graphs, counted, at an assumed {(GPU if gpu else CORE) / 1e9:g} "
        f"billion operations a second per {per}: only their ratios are meaningful.",
        f"Messages take an assumed {inside / 1e9:g} GB/s within a machine.",
    )
    outside = Link(bandwidth or BETWEEN_MACHINES, NETWORK_LATENCY)
    return Rates(operations, UPDATE / memory, Link(inside, LATENCY), outside, explanations)
