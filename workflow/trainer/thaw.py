"""Groups of parameters that stay as they are for a part of the run (`train.groups`, `frozen_until`).

There is one update per such group, which the host skips. A group's own count of updates begins when it thaws, as that
of a torch.optim state does with the first gradient, so that its bias correction is right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ortflow.workflow.device import Buffer
from ortflow.workflow.run.durations import parse_duration
from ortflow.workflow.run.pace import Pace
from ortflow.workflow.spec.train import TrainSection

_KEY = "frozen_updates"


class Thaw:
    """Which groups are frozen at a step, and how many updates they have missed."""

    def __init__(self, train: TrainSection) -> None:
        self._until = {
            number: parse_duration(group.frozen_until)
            for number, group in enumerate(train.groups)
            if group.frozen_until is not None
        }
        self._missed = dict.fromkeys(self._until, 0)
        self._gradients: dict[int, list[Buffer]] = {number: [] for number in self._until}
        self._frozen: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._until)

    def at(self, pace: Pace) -> None:
        """Called before each step with the run's position."""
        self._frozen = {number for number, until in self._until.items() if not pace.passed(until)}

    def hold(self, number: int, gradients: Sequence[Buffer]) -> None:
        """Name the slices of the gradients that belong to a group."""
        self._gradients[number] += gradients

    def silence(self) -> None:
        """Set the gradients of frozen groups to 0, before their norm is taken."""
        for number in self._frozen:
            for part in self._gradients[number]:
                part.fill(0)

    def count(self) -> None:
        """Called once for each update: frozen groups miss it, also those of which this rank has nothing."""
        for number in self._frozen:
            self._missed[number] += 1

    @property
    def missed(self) -> Mapping[int, int]:
        """The updates that each group has missed."""
        return self._missed

    def skipping(self, number: int, run: Callable[[], None]) -> Callable[[], None]:
        """The update of a group, which does nothing while it is frozen."""

        def maybe() -> None:
            if number not in self._frozen:
                run()

        return maybe

    def numbers(self) -> Mapping[str, float]:
        """For a checkpoint."""
        return {f"{_KEY}.{number}": float(missed) for number, missed in self._missed.items()}

    def restore(self, numbers: Mapping[str, float]) -> None:
        """From a checkpoint; raises ValueError if a value is invalid."""
        for number in self._missed:
            value = numbers.get(f"{_KEY}.{number}", 0.0)
            if value != int(value) or value < 0:
                raise ValueError(f"has {value!r} for {_KEY}.{number}")
            self._missed[number] = int(value)
