"""What a checkpoint has of a rank: its buffers, or its shares of the whole model if that is divided."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from ortflow.workflow.device import Buffer
from ortflow.workflow.device.shard import Shard, Sliced
from ortflow.workflow.memory import ITEM, KEPT
from ortflow.workflow.trainer.canonical import PARAMETERS, CanonicalState
from ortflow.workflow.trainer.parameters import Parameters

State = Mapping[str, Buffer | Shard]


class SavedState(Protocol):
    """See the module; its methods are those of `Trainer`."""

    is_copy: bool
    """Whether updates do not change it."""

    def state(self) -> State:
        """See `Trainer`."""

    def before_save(self) -> None:
        """See `Trainer`."""

    def after_load(self) -> None:
        """See `Trainer`."""

    def memory(self, memory: Mapping[str, int]) -> Mapping[str, int]:
        """The bytes that a rank stores, given those of what it holds."""

    def end_training(self) -> None:
        """Forget the moments, and copies for checkpoints."""


class HeldState:
    """The buffers of this rank."""

    is_copy = False

    def __init__(self, parameters: Parameters, moments: State) -> None:
        self._parameters, self._moments = parameters, moments

    def state(self) -> State:
        """See the protocol."""
        return {PARAMETERS: self._parameters.saved, **self._moments}

    def before_save(self) -> None:
        """See the protocol."""
        self._parameters.before_save()

    def after_load(self) -> None:
        """See the protocol."""
        self._parameters.after_load()

    def memory(self, memory: Mapping[str, int]) -> Mapping[str, int]:
        """See the protocol."""
        return memory

    def end_training(self) -> None:
        """See the protocol."""
        self._moments = {}
        self._parameters.end_training()


class WholeModelState:
    """Shares of the whole model in its canonical form, copied before a save and after a load."""

    is_copy = True

    def __init__(self, canonical: CanonicalState) -> None:
        self._canonical: CanonicalState | None = canonical
        self._shares: Mapping[str, Shard] = canonical.shares

    def state(self) -> State:
        """See the protocol."""
        return self._shares

    def before_save(self) -> None:
        """See the protocol."""
        assert self._canonical is not None
        self._canonical.gather()

    def after_load(self) -> None:
        """See the protocol."""
        assert self._canonical is not None
        self._canonical.scatter()

    def parameters(self) -> Sliced:
        """This rank's share of all parameters, up to date."""
        assert self._canonical is not None
        self._canonical.gather([PARAMETERS])
        return self._shares[PARAMETERS]

    def memory(self, memory: Mapping[str, int]) -> Mapping[str, int]:
        """See the protocol; `checkpoint` are the shares, and the copy that is written."""
        shares = sum(shard.part.count * ITEM for shard in self._shares.values())
        return {**memory, "checkpoint": shares + min(shares, KEPT)}

    def end_training(self) -> None:
        """See the protocol."""
        self._canonical, self._shares = None, {}
