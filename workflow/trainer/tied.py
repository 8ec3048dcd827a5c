"""Weights that several ranks of a replica hold: stages that share an embedding, parts that share a norm's scale.

The first of these ranks updates the weight and the others copy its values, so that they stay bit-identical, whatever
the order in which the replicas of each are summed. The first stage sums the gradients of all stages; parts have the
whole gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ortflow.workflow.comm import TAGS, Communicator, Request
from ortflow.workflow.device import Buffer, Device
from ortflow.workflow.parallel.ties import Tie

TAG = TAGS - 1
"""Of all these messages, which two ranks send and receive in the same order; no stage's."""


class TiedWeights:
    """The tied weights of one rank.

    `ties`: this rank's ties; see `ties`. `stages`: the ranks of its pipeline, ordered by stage. `later`: whether
    `take_over` leaves its messages in progress, beside the next forward pass, until `settle`.
    """

    def __init__(self, ties: Sequence[Tie], stages: Communicator, device: Device, *, later: bool = False) -> None:
        self._ties, self._stages, self._later = ties, stages, later
        self._sent: list[Request] = []
        pairs = {(tie.stages[0], stage) for tie in ties for stage in tie.stages[1:]}
        stages.connect_links([(*ends, TAG) for first, other in pairs for ends in ((other, first), (first, other))])
        counts = [tie.stop - tie.start for tie in ties if tie.stages[0] == stages.rank]
        self._arriving = device.allocate(max(counts, default=0), np.float32)

    def sum_gradients(self, gradients: Buffer) -> None:
        """Sum the gradient of each tied tensor over the stages; on stages that do not update it, set it to zero."""
        own_stage, requests, sent = self._stages.rank, list[Request](), list[Buffer]()
        for tie in self._ties:
            gradient = gradients.slice(tie.start, tie.stop)
            if tie.stages[0] != own_stage:
                requests.append(self._stages.start_send(gradient, tie.stages[0], TAG))
                sent.append(gradient)
                continue
            for stage in tie.stages[1:]:
                arriving = self._arriving.slice(0, gradient.count)
                self._stages.receive(arriving, stage, TAG)
                gradient.add(arriving)
        for request in requests:
            request.wait()
        for sent_gradient in sent:
            sent_gradient.fill(0)

    def take_over(self, parameters: Buffer) -> None:
        """Copy the values from the stage that updates a tensor to all that hold it."""
        own_stage = self._stages.rank
        for tie in self._ties:
            weight = parameters.slice(tie.start, tie.stop)
            if tie.stages[0] == own_stage:
                self._sent += [self._stages.start_send(weight, stage, TAG) for stage in tie.stages[1:]]
            else:
                self._stages.receive(weight, tie.stages[0], TAG)
        if not self._later:
            self.settle()

    def settle(self) -> None:
        """Called before the parameters change: wait until what `take_over` has sent is received."""
        sent, self._sent = self._sent, []
        for request in sent:
            request.wait()


class CommonWeights:
    """Tensors that all parts hold.

    `spans`: their elements of the local flat buffers; see `common`. `parts`: the ranks that share the layers.
    `repeated`: makes work that a device repeats.
    """

    def __init__(
        self,
        spans: Sequence[tuple[int, int]],
        parts: Communicator,
        parameters: Buffer,
        device: Device,
        repeated: Callable[[str, Callable[[], None]], Callable[[], None]],
    ) -> None:
        self._parts = parts
        # In one message: each takes longer than these tensors do.
        self._packed = device.allocate(sum(stop - start for start, stop in spans), np.float32)
        self._pieces: list[tuple[Buffer, Buffer]] = []
        place = 0
        for start, stop in spans:
            packed = self._packed.slice(place, place + stop - start)
            self._pieces.append((parameters.slice(start, stop), packed))
            place += stop - start
        self._move = repeated("the copies of what parts have in common", self._copy)
        if spans:
            parts.connect_links([(0, part, TAG) for part in range(1, parts.world_size)])

    def _copy(self) -> None:
        for weight, packed in self._pieces:
            if self._parts.rank:
                weight.copy_from(packed)
            else:
                packed.copy_from(weight)

    def take_over(self) -> None:
        """Copy the first part's values to all parts."""
        if not self._pieces:
            return
        if self._parts.rank:
            self._parts.receive(self._packed, 0, TAG)
            self._move()
            return
        self._move()
        requests = [self._parts.start_send(self._packed, part, TAG) for part in range(1, self._parts.world_size)]
        for request in requests:
            request.wait()
