"""What passes between the ranks in a step: sums of gradients, of squares and of the tail, and updated parameters.

`divided_reduction` has that of a divided model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ortflow.workflow.comm import Communicator
from ortflow.workflow.comm.solo import SoloCommunicator
from ortflow.workflow.device import Buffer
from ortflow.workflow.trainer.buffers import StepBuffers

if TYPE_CHECKING:
    from ortflow.workflow.trainer.overlap import Overlap


class Reduction(Protocol):
    """See the module. Every rank calls each of these."""

    after_each: bool
    """Whether gradients are summed after each micro-batch, and those of this rank's share are added up."""

    def sum_gradients(self) -> None:
        """Sum, after passes, the gradients of the elements that this rank updates, unless that is done otherwise."""
        return

    def sum_rest(self) -> None:
        """Sum what is not summed yet of the step: running statistics and tail."""

    def sum_squares(self, squares: Buffer) -> None:
        """Sum the squares of the gradients that each rank updates."""

    def sum_norms(self, sums: Buffer) -> None:
        """Sum squares over the ranks that have pieces of the same tensors: of one norm of all tensors after another."""

    def settle(self) -> None:
        """Called before the parameters change: wait until what was sent of them is received."""
        return

    def gather_parameters(self) -> None:
        """Let every rank have the parameters that others update."""
        return


class AllReduce(Reduction):
    """One sum of gradients, running statistics and tail, behind the passes.

    Under ZeRO's stage 3 the graphs sum the gradients and fetch parameters, and there are none in the buffers. With
    `overlap`, everything is summed in buckets beside the backward pass.
    """

    after_each = False

    def __init__(self, ranks: Communicator, buffers: StepBuffers, overlap: Overlap | None = None) -> None:
        self._ranks, self._buffers, self._overlap = ranks, buffers, overlap

    def sum_rest(self) -> None:
        """See the protocol."""
        if self._overlap is None:
            self._ranks.all_reduce(self._buffers.sync)
        else:
            self._overlap.watch()

    def sum_squares(self, squares: Buffer) -> None:
        """See the protocol."""
        self._ranks.all_reduce(squares)

    def sum_norms(self, sums: Buffer) -> None:
        """See the protocol."""
        self._ranks.all_reduce(sums)


class Scatter(Reduction):
    """ZeRO stages 1 and 2 (Rajbhandari et al. 2020): each rank gets the sums of its share, and updates that.

    `ranks`: those that train the same. `sharded`: false in stage 0, where each rank gets and updates all.
    """

    def __init__(
        self, ranks: Communicator, buffers: StepBuffers, trained: Buffer, *, sharded: bool, after_each: bool
    ) -> None:
        self._ranks, self._buffers, self._trained, self._sharded = ranks, buffers, trained, sharded
        self.after_each = after_each
        self.sharers = ranks if sharded else SoloCommunicator()
        """The ranks over which moments are sharded."""

    def sum_gradients(self) -> None:
        """See the protocol."""
        if self._sharded:
            self._ranks.reduce_scatter(self._buffers.gradients)
        else:
            self._ranks.all_reduce(self._buffers.gradients)

    def sum_rest(self) -> None:
        """See the protocol."""
        self._ranks.all_reduce(self._buffers.rest)

    def sum_squares(self, squares: Buffer) -> None:
        """See the protocol."""
        self.sharers.all_reduce(squares)

    def sum_norms(self, sums: Buffer) -> None:
        """See the protocol."""
        self.sharers.all_reduce(sums)

    def gather_parameters(self) -> None:
        """See the protocol."""
        self.sharers.all_gather(self._trained)
