"""Weights that several ranks of a replica hold: stages that share an embedding, parts that share a norm's scale.

The first of these ranks updates the weight and the others copy its values, so that they stay bit-identical, whatever
the order in which the replicas of each are summed. The first stage sums the gradients of all stages; parts have the
whole gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ortflow.workflow.comm import Communicator
from ortflow.workflow.device import Buffer
from ortflow.workflow.device.cpu import HostBuffer
from ortflow.workflow.parallel.ties import Tie


class TiedWeights:
    """The tied weights of one rank.

    Parameters
    ----------
    ties
        This rank's ties; see `ties`.
    stages
        The ranks of its pipeline, ordered by stage.
    """

    def __init__(self, ties: Sequence[Tie], stages: Communicator) -> None:
        self._ties, self._stages = ties, stages

    def sum_gradients(self, gradients: Buffer) -> None:
        """Sum the gradient of each tied tensor over the stages; on stages that do not update it, set it to zero."""
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
        """Copy the values from the stage that updates a tensor to all that hold it."""
        here, requests = self._stages.rank, []
        for number, tie in enumerate(self._ties):
            mine = parameters.slice(tie.start, tie.stop)
            if tie.stages[0] == here:
                requests += [self._stages.start_send(mine, stage, number) for stage in tie.stages[1:]]
            else:
                self._stages.receive(mine, tie.stages[0], number)
        for request in requests:
            request.wait()


def take_over_common(parameters: Buffer, spans: Sequence[tuple[int, int]], parts: Communicator) -> None:
    """Copy the first part's values of tensors that all parts hold to all parts."""
    requests = []
    for number, (start, stop) in enumerate(spans):
        mine = parameters.slice(start, stop)
        if parts.rank:
            parts.receive(mine, 0, number)
        else:
            requests += [parts.start_send(mine, part, number) for part in range(1, parts.world_size)]
    for request in requests:
        request.wait()
