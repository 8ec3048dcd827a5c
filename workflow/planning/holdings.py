"""Bytes of what a rank holds besides its graphs' values, by part. Pure.

The same numbers as the event `memory` reports after a run.
"""

from __future__ import annotations

from ortflow.workflow.device.prefetch import SLOTS, WORTHWHILE
from ortflow.workflow.layout import FlatIndex, share
from ortflow.workflow.memory import ITEM, KEPT, buffers
from ortflow.workflow.parallel.division import Division
from ortflow.workflow.spec.optimizers import OPTIMIZERS
from ortflow.workflow.spec.run import TrainerRunSpec


def state_of(
    spec: TrainerRunSpec, model_index: FlatIndex, division: Division | None = None, rank: int = 0, messages: int = 0
) -> dict[str, int]:
    """Parameters, gradients, moments and the checkpoint's copies of a rank.

    Parameters
    ----------
    spec
        The run.
    model_index
        The index of the undivided model.
    division
        How the model is divided; None if each rank holds it whole.
    rank
        Rank of the world.
    messages
        Elements of the buffers through which layers are fetched (ZeRO 3).
    """
    buffer_count = len(spec.train.buffers)
    index, replica, replicas = model_index, rank, spec.world_size
    if division is not None:
        place = division.grid.place(rank)
        index, replica, replicas = division.of(place).index, place.data, division.grid.data
    parts = buffers(
        index.trained, index.size - index.trained, buffer_count, accumulation=spec.accumulation, world_size=replicas,
        zero=spec.parallel.zero, rank=replica, messages=messages, chunks=spec.parallel.chunks,
        staging=staging_elements(index, spec), copied=None if spec.on_gpus else KEPT,
    )  # fmt: skip
    start, end = index.span("state")
    # Running statistics are stored after the gradients, and once more as the start of a micro-batch.
    parts["gradients"] += 2 * (end - start) * ITEM
    if division is not None:
        # The ranks of a divided model gather shares of the whole state before a save (trainer/canonical.py): these are
        # held beside the copy that is written.
        shares = _canonical(model_index, buffer_count, rank, division.grid.world_size)
        parts["checkpoint"] = shares + (shares if spec.on_gpus else min(shares, KEPT))
    return parts


def batches_of(spec: TrainerRunSpec, size: int) -> int:
    """Bytes in which a rank holds micro-batches of `size` bytes: on GPUs also those that are on their way."""
    if not spec.on_gpus or spec.parallel.pipeline > 1 or size < WORTHWHILE:
        return size
    # The first micro-batch of a step and further ones have memory of their own where their gradients have.
    graphs = 2 if spec.accumulation > 1 and spec.parallel.zero < 2 else 1
    return graphs * (1 + SLOTS) * size


def staging_elements(index: FlatIndex, spec: TrainerRunSpec) -> int | None:
    """Elements of the GPU through which off-loaded moments pass; None if they are not off-loaded."""
    if spec.train.offload == "none":
        return None
    from ortflow.workflow.optim.segments import pieces, segments_of
    from ortflow.workflow.trainer.streamed import groups_of, staging_of

    optimizer, ranks = spec.train.optimizer, spec.replicas if spec.parallel.zero else 1
    rank_pieces = pieces(segments_of(spec.train, index), *share(index.trained, 0, ranks))
    groups = groups_of(rank_pieces, uncut=OPTIMIZERS[optimizer.name].whole_tensors)
    return staging_of(groups, len(spec.train.buffers))


def _canonical(model_index: FlatIndex, moments: int, rank: int, world: int) -> int:
    """Bytes of a rank's shares of the canonical state."""
    counts = [model_index.size, *[model_index.trained] * moments]
    return sum(stop - start for start, stop in (share(count, rank, world) for count in counts)) * ITEM
