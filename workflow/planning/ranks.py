"""The memory of a rank under a layout: what it holds, its graphs' values and its messages.

Used by `forecast` and `survey`. Pure apart from the graphs that it is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ortflow.workflow.graph.memory.peak_memory import Peak
from ortflow.workflow.layout import FlatIndex
from ortflow.workflow.memory import ON_HOST, of_device
from ortflow.workflow.parallel.division import Division
from ortflow.workflow.parallel.grid import Place
from ortflow.workflow.parallel.schedule import schedule
from ortflow.workflow.planning.holdings import batches_of, state_of
from ortflow.workflow.planning.passes import StagePasses
from ortflow.workflow.planning.replay import Replayed, replay
from ortflow.workflow.spec.run import TrainerRunSpec

PROCESS = 220_000_000
"""Further bytes of rank 0 on the CPU, measured: interpreter, libraries, and memory left from building the graphs."""
FOLLOWER = 175_000_000
"""The same of the other ranks, which build no graphs."""
CONTEXT = 600_000_000
"""Bytes of a GPU that CUDA's context, cuBLAS and cuDNN use per process. A fixed estimate."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes of a rank by part."""

    rank: int
    parts: Mapping[str, int]
    peak: Peak
    """Of its graphs' values."""
    on_gpu: bool = False

    @property
    def total(self) -> int:
        """Total bytes of the device."""
        return of_device(self.parts, gpu=self.on_gpu)


def memory_of(
    spec: TrainerRunSpec,
    model_index: FlatIndex,
    peak: Peak,
    batch: int,
    *,
    division: Division | None = None,
    rank: int = 0,
    fetched: int = 0,
    messages: int = 0,
) -> RankMemory:
    """The memory of one rank.

    Parameters
    ----------
    spec
        The run.
    model_index
        The index of the undivided model.
    peak
        Of the values of this rank's graphs.
    batch
        Bytes of a micro-batch.
    division
        How the model is divided, if it is.
    rank
        The rank.
    fetched
        Elements of the buffers through which layers are fetched (ZeRO 3).
    messages
        Bytes of messages between stages, or of the buffers in which gradients of other GPUs arrive.
    """
    state = state_of(spec, model_index, division, rank, fetched)
    on_host = {name: state.pop(name) for name in ON_HOST if name in state}
    parts = {**state, "batch": batches_of(spec, batch), "activations": peak.held}
    if messages:
        parts["messages"] = parts.get("messages", 0) + messages
    overhead = (
        {"context": CONTEXT, **on_host} if spec.on_gpus else {**on_host, "process": FOLLOWER if rank else PROCESS}
    )
    return RankMemory(rank, {**parts, **overhead}, peak, spec.on_gpus)


def pipeline_memory(
    spec: TrainerRunSpec, model_index: FlatIndex, division: Division, replays: Sequence[Replayed], batch: int
) -> list[RankMemory]:
    """The memory of the ranks of one replica of a pipeline; `replays` are those of the stages' ranks, in order."""
    grid = division.grid
    return [
        memory_of(
            spec, model_index, replayed.peak, batch, division=division, rank=grid.rank(Place(0, stage, part)),
            messages=replayed.messages,
        )
        for stage, replayed in enumerate(replays)
        for part in range(grid.horizontal)
    ]  # fmt: skip


def part_memory(
    spec: TrainerRunSpec, model_index: FlatIndex, division: Division, peak: Peak, batch: int
) -> list[RankMemory]:
    """The memory of the ranks of one replica, which share all layers."""
    grid = division.grid
    ranks = [grid.rank(Place(0, 0, part)) for part in range(grid.horizontal)]
    return [memory_of(spec, model_index, peak, batch, division=division, rank=rank) for rank in ranks]


def most(memories: Sequence[RankMemory]) -> RankMemory:
    """That of the rank that needs most, the first of equal ones."""
    return max(memories, key=lambda memory: memory.total)


def replays_of(spec: TrainerRunSpec, stages: Sequence[StagePasses]) -> list[Replayed]:
    """The schedule of each rank of a pipeline, followed through its memory."""
    parallel, ranks = spec.parallel, spec.parallel.pipeline
    count = spec.accumulation
    if parallel.schedule != "gpipe":
        # Behind the first micro-batches a rank keeps as many as before.
        count = min(count, 3 * ranks * parallel.chunks)
    actions = schedule(parallel.schedule, ranks, count, parallel.chunks)
    replays = []
    for rank in range(ranks):
        chunks = [stage.memory for stage in stages[rank::ranks]]
        if parallel.schedule == "gpipe":
            # With one micro-batch, gpipe's backward pass follows at once, too, but its ranks open no joint graph.
            chunks = [replace(chunk, joint=None) for chunk in chunks]
        replays.append(replay(actions[rank], chunks))
    return replays
