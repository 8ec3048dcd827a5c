"""The order in which the ranks of a pipeline process the micro-batches of a step. Pure.

A model is cut into `chunks` x `ranks` stages. Rank r has the stages r, r + ranks, r + 2 ranks and so on, one for each
of its chunks. GPipe (Huang et al. 2019) runs all forward passes before the first backward pass. 1F1B (PipeDream,
Narayanan et al. 2019) runs a backward pass as soon as one is possible, so that a rank keeps the activations of at most
as many micro-batches as there are stages from it to the last. Interleaved 1F1B (Narayanan et al. 2021) does the same
with several chunks, which shortens the bubble by a factor of `chunks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from typing_extensions import assert_never

Pass = Literal["forward", "backward"]
Kind = Literal["gpipe", "1f1b", "interleaved"]


@dataclass(frozen=True)
class Action:
    """One pass of one micro-batch through one chunk of a rank."""

    direction: Pass
    micro_batch: int
    chunk: int = 0

    def stage(self, rank: int, ranks: int) -> int:
        """The stage of the model, from 0."""
        return self.chunk * ranks + rank


def schedule(kind: Kind, ranks: int, micro_batches: int, chunks: int = 1) -> list[list[Action]]:
    """The actions of each rank, in order.

    Parameters
    ----------
    kind
        gpipe, 1f1b or interleaved; only interleaved supports several chunks.
    ranks
        Ranks of the pipeline.
    micro_batches
        Per step; 0 gives empty lists.
    chunks
        Stages per rank.

    Raises
    ------
    ValueError
        If a schedule for one chunk is requested with several.
    """
    if chunks != 1 and kind != "interleaved":
        raise ValueError(f"{kind} has one chunk a rank, not {chunks}")
    if kind == "gpipe":
        return [_gpipe(micro_batches) for _ in range(ranks)]
    if kind == "1f1b" or kind == "interleaved":
        return [_one_forward_one_backward(rank, ranks, micro_batches, chunks) for rank in range(ranks)]
    assert_never(kind)


def _gpipe(micro_batches: int) -> list[Action]:
    numbers = range(micro_batches)
    return [*(Action("forward", n) for n in numbers), *(Action("backward", n) for n in numbers)]


def _one_forward_one_backward(rank: int, ranks: int, micro_batches: int, chunks: int) -> list[Action]:
    """Forward passes until the first backward pass can begin, then one of each in turn, then backward passes."""
    if chunks > 1 and micro_batches % ranks:
        # A schedule from which some micro-batches are removed still never deadlocks.
        full_schedule = _one_forward_one_backward(rank, ranks, -(-micro_batches // ranks) * ranks, chunks)
        return [action for action in full_schedule if action.micro_batch < micro_batches]
    forward = _by_groups(ranks, micro_batches, range(chunks))
    backward = _by_groups(ranks, micro_batches, range(chunks - 1, -1, -1))
    # As in Megatron-LM: with chunks, twice a rank's distance to the last one, and the passes of all chunks but one.
    ahead = (ranks - 1 - rank) * (1 if chunks == 1 else 2) + (chunks - 1) * ranks
    ahead = min(ahead, len(forward))
    actions = [Action("forward", *position) for position in forward[:ahead]]
    for number, position in enumerate(backward):
        if ahead + number < len(forward):
            actions.append(Action("forward", *forward[ahead + number]))
        actions.append(Action("backward", *position))
    return actions


def _by_groups(ranks: int, micro_batches: int, chunks: Sequence[int]) -> list[tuple[int, int]]:
    """Micro-batch and chunk of each pass: as many micro-batches as ranks through one chunk, then through the next."""
    return [
        (micro_batch, chunk)
        for start in range(0, micro_batches, ranks)
        for chunk in chunks
        for micro_batch in range(start, min(start + ranks, micro_batches))
    ]
