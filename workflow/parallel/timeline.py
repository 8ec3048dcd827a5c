"""When each action of a pipeline's schedule begins and ends, and how long ranks wait. Pure.

Used by `benchmarks/pipeline.py`; a schedule that would deadlock raises ValueError here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ortflow.workflow.parallel.schedule import Action


@dataclass(frozen=True)
class Timeline:
    """Start and end of each action of each rank."""

    spans: list[list[tuple[float, float]]]

    @property
    def end(self) -> float:
        """End of the last action."""
        return max((span[1] for spans in self.spans for span in spans), default=0.0)

    @property
    def bubble(self) -> float:
        """Fraction of the time in which ranks wait, averaged over the ranks."""
        busy = sum(end - start for spans in self.spans for start, end in spans)
        return 1 - busy / (self.end * len(self.spans)) if self.end else 0.0


def timeline(
    actions: Sequence[Sequence[Action]], duration: Callable[[int, Action], float], transfer: float = 0.0
) -> Timeline:
    """Simulate a schedule.

    Parameters
    ----------
    actions
        Of each rank, in order.
    duration
        Time that an action takes, by rank and action.
    transfer
        Time from the end of an action until the next stage has its result.

    Raises
    ------
    ValueError
        If an action waits for one that can never run.
    """
    ranks = len(actions)
    last = max(
        (action.stage(rank, ranks) for rank, rank_actions in enumerate(actions) for action in rank_actions), default=0
    )
    ended: dict[tuple[str, int, int], float] = {}
    spans: list[list[tuple[float, float]]] = [[] for _ in actions]
    moved = True
    while moved:
        moved = False
        for rank, rank_actions in enumerate(actions):
            while len(spans[rank]) < len(rank_actions):
                action = rank_actions[len(spans[rank])]
                stage = action.stage(rank, ranks)
                dependencies = sources(action, stage, last)
                if any(key not in ended for key in dependencies):
                    break
                ready = max((ended[key] + (transfer if key[1] != stage else 0.0) for key in dependencies), default=0.0)
                start = max(ready, spans[rank][-1][1] if spans[rank] else 0.0)
                spans[rank].append((start, start + duration(rank, action)))
                ended[action.direction, stage, action.micro_batch] = spans[rank][-1][1]
                moved = True
    for rank, rank_actions in enumerate(actions):
        if len(spans[rank]) < len(rank_actions):
            raise ValueError(f"rank {rank} waits for ever before {rank_actions[len(spans[rank])]}")
    return Timeline(spans)


def sources(action: Action, stage: int, last: int) -> list[tuple[str, int, int]]:
    """The actions that an action depends on, as direction, stage and micro-batch."""
    number = action.micro_batch
    if action.direction == "forward":
        return [("forward", stage - 1, number)] if stage else []
    return [("forward", stage, number), *([("backward", stage + 1, number)] if stage < last else [])]


def bubble_by_formula(ranks: int, micro_batches: int, chunks: int = 1) -> float:
    """Fraction of the time in which ranks wait if all stages take equal time: (p-1)/(v m + p-1).

    Huang et al. 2019 for one chunk; Narayanan et al. 2021, section 2.2, for several.
    """
    return (ranks - 1) / (chunks * micro_batches + ranks - 1)
