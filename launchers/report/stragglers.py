"""The rank that the others wait for, and what it does meanwhile. Pure.

Ranks meet in every step, so that all their steps take the same time: the slowest rank is the one that waits least for
the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

SHARE = 0.1
"""The part of a step from which a difference is reported."""
FEWEST = 5
"""Steps that a comparison needs."""


@dataclass(frozen=True)
class StepTimes:
    """Of one rank, the average seconds of a step by part."""

    rank: int
    step: float
    comm: float
    data: float

    @property
    def compute(self) -> float:
        """The rest of a step."""
        return max(0.0, self.step - self.comm - self.data)


@dataclass(frozen=True)
class Straggler:
    """A rank that is slower than its peers."""

    rank: int
    share: float
    """The part of a step in which the median rank waits longer for others than this one."""
    cause: str
    """`data`, `compute`, or `between steps`: events, saves, the machine."""
    seconds: float
    """Those of a step that its peers wait for it."""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    def sentence(self) -> str:
        """What is slow, for people."""
        descriptions = {
            "data": "it waits for its samples",
            "compute": "it computes longer",
            "between steps": "it is held up between its steps",
        }
        return (
            f"Rank {self.rank} is slower than its peers, which wait for it {1000 * self.seconds:.1f} ms a step "
            f"({100 * self.share:.0f}%): {descriptions[self.cause]}."
        )


def step_times(
    rank: int, seconds: Mapping[int, float], comm: Mapping[int, float], data: Mapping[int, float]
) -> StepTimes | None:
    """The averages over the steps with both times; the first step of an attempt is slow for all. None if too few."""
    steps = sorted(seconds.keys() & comm.keys())[1:]
    if len(steps) < FEWEST:
        return None
    count = len(steps)
    return StepTimes(
        rank,
        sum(seconds[step] for step in steps) / count,
        sum(comm[step] for step in steps) / count,
        sum(data.get(step, 0.0) for step in steps) / count,
    )


def straggler(times: Sequence[StepTimes]) -> Straggler | None:
    """The rank that its peers wait for; None if there is none, or too few ranks were measured."""
    if len(times) < 2:
        return None
    slowest = min(times, key=lambda rank_times: rank_times.comm)
    peers = [rank_times for rank_times in times if rank_times is not slowest]
    excess = median(rank_times.comm for rank_times in peers) - slowest.comm
    step = median(rank_times.step for rank_times in times)
    if step <= 0 or excess / step < SHARE:
        return None
    differences = {
        "data": slowest.data - median(rank_times.data for rank_times in peers),
        "compute": slowest.compute - median(rank_times.compute for rank_times in peers),
    }
    cause = max(differences, key=lambda name: differences[name])
    if differences[cause] < excess / 2:
        cause = "between steps"
    return Straggler(slowest.rank, min(1.0, excess / step), cause, excess)
