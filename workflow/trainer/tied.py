"""Weights that several stages hold, such as an embedding that is the output layer's too.

The first of the stages updates them: it adds up the gradients of all, and the others take over its values. So they stay
equal bit for bit, whatever the order in which the replicas of each stage are summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ortflow.workflow.comm import Communicator
from ortflow.workflow.device import Buffer
from ortflow.workflow.device.cpu import HostBuffer
from ortflow.workflow.parallel.division import TRAINED, Division
from ortflow.workflow.parallel.grid import Place


@dataclass(frozen=True)
class Tie:
    """A tensor that this rank holds, and others with it."""

    start: int
    stop: int
    """Its elements of the local flat buffers."""
    stages: tuple[int, ...]
    """The stages that hold it, that which updates it first."""


def ties(division: Division, place: Place) -> list[Tie]:
    """The trained tensors that this rank's stage shares with others, in the same order on all of them.

    Raises ValueError if holders of the same elements are different parts of their stages: they cannot find each other.
    """
    parts, number = division.grid.horizontal, division.number(place)
    index, found = division.holdings[number].index, []
    for entry in division.whole:
        if entry.name not in index or entry.tensor.group not in TRAINED:
            continue
        holders = [divmod(each, parts) for each in division.holders(number, entry.name)]
        if len({stage for stage, _ in holders}) < 2:
            continue
        # Where each part of a stage holds the whole tensor, each is tied to the same part of the other stages.
        stages = tuple(stage for stage, part in holders if part == place.part)
        if len(stages) != len({stage for stage, _ in holders}):
            raise ValueError(f"{entry.name} is not divided alike in all stages that use it")
        here = index[entry.name]
        found.append(Tie(here.offset, here.end, stages))
    return found


class TiedWeights:
    """The tied weights of one rank.

    Parameters
    ----------
    ties
        Those of this rank; see `ties`.
    stages
        The ranks of its pipeline, in the order of the stages.
    """

    def __init__(self, ties: Sequence[Tie], stages: Communicator) -> None:
        self._ties, self._stages = ties, stages

    def sum_gradients(self, gradients: Buffer) -> None:
        """On the stage that updates a tensor, the sum of its gradient over the stages; on the others zero."""
        here, requests = self._stages.rank, []
        for number, tie in enumerate(self._ties):
            mine = gradients.slice(tie.start, tie.stop)
            if tie.stages[0] != here:
                requests.append(self._stages.start_send(HostBuffer(mine.read()), tie.stages[0], number))
                mine.fill(0)
                continue
            total = mine.read()
            arriving = HostBuffer(np.empty_like(total))
            for stage in tie.stages[1:]:
                self._stages.receive(arriving, stage, number)
                with np.errstate(invalid="ignore", over="ignore"):
                    total += arriving.array
            mine.write(total)
        for request in requests:
            request.wait()

    def take_over(self, parameters: Buffer) -> None:
        """The values of the stage that updates a tensor, on all that hold it."""
        here, requests = self._stages.rank, []
        for number, tie in enumerate(self._ties):
            mine = parameters.slice(tie.start, tie.stop)
            if tie.stages[0] == here:
                requests += [self._stages.start_send(mine, stage, number) for stage in tie.stages[1:]]
            else:
                self._stages.receive(mine, tie.stages[0], number)
        for request in requests:
            request.wait()
