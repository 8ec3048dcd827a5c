"""The parameters of a rank that holds all of what it trains. `sharded_parameters` has those of ZeRO's stage 3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ortflow.workflow.device import Buffer, Device
from ortflow.workflow.device.shard import Shard, Sliced
from ortflow.workflow.layout import FlatIndex


class Parameters(Protocol):
    """Parameters and running statistics in flat buffers."""

    @property
    def here(self) -> Sliced:
        """What this rank holds of the flat buffer."""

    @property
    def saved(self) -> Buffer | Shard:
        """What this rank saves of it, as `Trainer.state` returns it."""

    def load(self, tensors: Mapping[str, npt.NDArray[np.float32]]) -> None:
        """Set what this rank holds of every tensor to the values given by name."""

    def before_save(self) -> None:
        """Bring `saved` up to date."""
        return

    def after_load(self) -> None:
        """Use what was loaded into `saved`."""
        return

    def end_training(self) -> None:
        """Release what is only saved."""
        return


class WholeParameters(Parameters):
    """The whole flat buffer."""

    def __init__(self, device: Device, index: FlatIndex) -> None:
        self._index = index
        self.buffer = device.allocate(index.size, np.float32)

    @property
    def here(self) -> Buffer:
        """See the protocol."""
        return self.buffer

    @property
    def saved(self) -> Buffer:
        """See the protocol."""
        return self.buffer

    @property
    def trained(self) -> Buffer:
        """Those that updates change."""
        return self.buffer.slice(0, self._index.trained)

    def load(self, tensors: Mapping[str, npt.NDArray[np.float32]]) -> None:
        """See the protocol."""
        for entry in self._index:
            self.buffer.slice(entry.offset, entry.end).write(tensors[entry.name])
