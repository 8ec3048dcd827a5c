"""The batches of a user's loader from the run's position, by what the loader can do.

A loader with a `Sampler` is moved to the step, on any number of ranks. One with `state_dict` and `load_state_dict`
(torchdata's StatefulDataLoader) continues by itself. Any other is replayed: its pass begins again with the random
states that it began with, and the batches that were used are drawn and dropped, so that a shuffled order and the random
numbers of workers are the same. The last two need as many ranks as before.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from ortflow.program import random_states
from ortflow.program.errors import ProgramError
from ortflow.program.sampler import Sampler
from ortflow.program.workers import WorkerStart
from ortflow.program.world import World


class Feed:
    """One loader in one run.

    Parameters
    ----------
    origin
        The run's step at which this loader gave its first batch.
    """

    def __init__(self, loader: Iterable[Any], place: World, origin: int) -> None:
        self.loader, self._place, self.origin = loader, place, origin
        self._first: dict[str, Any] = {}
        self._sampler = _sampler(loader)
        if self._sampler is not None:
            self.kind = "sampler"
        elif callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None)):
            self.kind = "state"
        else:
            self.kind = "replay"
        self._prepare_workers()

    def _prepare_workers(self) -> None:
        loader: Any = self.loader
        if not getattr(loader, "num_workers", 0) or not hasattr(loader, "worker_init_fn"):
            return
        if self._sampler is not None:
            self._sampler.keyed = True
        if not isinstance(loader.worker_init_fn, WorkerStart):
            loader.worker_init_fn = WorkerStart(loader.worker_init_fn, keyed=self._sampler is not None)

    def begin(self, step: int, epoch: int) -> Iterator[Any]:
        """Begin a pass at the run's step."""
        self._set_epoch(epoch)
        if self._sampler is not None:
            self._sampler.seek(step - self.origin)
        self._end_persistent_workers()
        self._first = {"random": random_states.capture(device=False), "generators": self._generators()}
        return iter(self.loader)

    def state(self, epoch: int, drawn: int) -> dict[str, Any]:
        """Return the position after `drawn` batches of the pass."""
        loader: Any = self.loader
        return {
            "kind": self.kind, "epoch": epoch, "drawn": drawn, "origin": self.origin, "first": self._first,
            "generators": self._generators(),
            "state": loader.state_dict() if self.kind == "state" else None,
            "sampler": self._sampler.identity() if self._sampler is not None else None,
        }  # fmt: skip

    def resume(self, state: dict[str, Any], step: int, world_size: int) -> Iterator[Any]:
        """Continue a pass; the caller then restores the current random states. Raises ProgramError if it cannot."""
        self._check(state, world_size)
        loader: Any = self.loader
        self.origin, self._first = state["origin"], state["first"]
        self._set_epoch(state["epoch"])
        if self._sampler is not None:
            self._sampler.seek(step - self.origin)
        if self.kind == "state":
            loader.load_state_dict(state["state"])
        complete = state["drawn"] > 0 and state["drawn"] == _length(loader)
        if self._sampler is not None:
            complete = state["drawn"] > 0 and self._sampler.begins_epoch(step - self.origin)
        self._end_persistent_workers()
        random_states.restore(self._first["random"])
        self._set_generators(self._first["generators"])
        iterator: Iterator[Any] = iter(()) if complete else iter(loader)
        if self.kind == "replay" and not complete:
            for number in range(state["drawn"]):
                try:
                    next(iterator)
                except StopIteration:
                    raise ProgramError(
                        f"the loader ended after {number} batches, and the checkpoint was saved after "
                        f"{state['drawn']} of them: its data have changed"
                    ) from None
        self._set_generators(state["generators"])
        return iterator

    def _check(self, state: dict[str, Any], world_size: int) -> None:
        if state["kind"] != self.kind:
            words = {"sampler": "one with a Sampler", "state": "one with state_dict", "replay": "one with neither"}
            raise ProgramError(
                f"the checkpoint's loader was {words[state['kind']]}, and this is {words[self.kind]} (of Sampler and "
                "state_dict): its position does not fit"
            )
        if self._sampler is not None:
            self._sampler.check(state["sampler"])
        elif world_size != self._place.size:
            raise ProgramError(
                f"the checkpoint is of {world_size} ranks, and this run has {self._place.size}: the position of a "
                f"{type(self.loader).__name__} without ortflow.program.Sampler is valid for the same number alone. "
                f"Resume with {world_size} ranks; a new run may use batch_sampler=ortflow.program.Sampler(…)"
            )

    def _set_epoch(self, epoch: int) -> None:
        for part in _parts(self.loader):
            if callable(getattr(part, "set_epoch", None)):
                part.set_epoch(epoch)

    def _end_persistent_workers(self) -> None:
        """Have new workers begin each pass: the states of old ones cannot be restored. With keys they need not be."""
        loader: Any = self.loader
        if self.kind == "replay" and getattr(loader, "persistent_workers", False):
            # torch's DataLoader keeps the iterator of persistent workers here, and would use it again.
            loader._iterator = None

    def _generators(self) -> list[Any]:
        return [generator.get_state() for generator in _generators(self.loader)]

    def _set_generators(self, states: list[Any]) -> None:
        for generator, state in zip(_generators(self.loader), states, strict=False):
            generator.set_state(state)


def _sampler(loader: Any) -> Sampler | None:
    candidates = (loader, getattr(loader, "batch_sampler", None))
    return next((value for value in candidates if isinstance(value, Sampler)), None)


def _parts(loader: Any) -> list[Any]:
    """The loader and what it draws from, each once."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    parts = [
        loader, batch_sampler, getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None),
        getattr(loader, "dataset", None),
    ]  # fmt: skip
    return list({id(part): part for part in parts if part is not None}.values())


def _generators(loader: Any) -> list[Any]:
    """The loader's own torch generators, each once."""
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    generators = [getattr(part, "generator", None) for part in _parts(loader)]
    return list({id(value): value for value in generators if isinstance(value, torch.Generator)}.values())


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None
