"""The states of the random generators that a process has by itself, and of those that a program makes."""

from __future__ import annotations

import random
import sys
from typing import Any


def capture(*, device: bool = True) -> dict[str, Any]:
    """Return the states of Python's generator, numpy's and torch's; with `device`, those of the GPUs in use, too."""
    states: dict[str, Any] = {"python": random.getstate()}
    if (numpy := sys.modules.get("numpy")) is not None:
        states["numpy"] = numpy.random.get_state()
    if (torch := sys.modules.get("torch")) is not None:
        states["torch"] = torch.get_rng_state()
        # Asking for the state of a GPU that is not in use would initialise CUDA on it.
        if device and torch.cuda.is_available() and torch.cuda.is_initialized():
            states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def restore(states: dict[str, Any]) -> None:
    """Set what `capture` returned."""
    random.setstate(states["python"])
    if "numpy" in states:
        import numpy

        numpy.random.set_state(states["numpy"])
    if "torch" in states:
        import torch

        torch.set_rng_state(states["torch"])
        for number, state in enumerate(states.get("cuda", ())):
            if number < torch.cuda.device_count():
                torch.cuda.set_rng_state(state, number)


class Generator:
    """A random generator of the program with the methods of the other registered objects."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        """Return its state."""
        if isinstance(self._generator, random.Random):
            return {"state": self._generator.getstate()}
        if hasattr(self._generator, "bit_generator"):
            return {"state": self._generator.bit_generator.state}
        return {"state": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set its state."""
        if isinstance(self._generator, random.Random):
            self._generator.setstate(state["state"])
        elif hasattr(self._generator, "bit_generator"):
            self._generator.bit_generator.state = state["state"]
        else:
            self._generator.set_state(state["state"].cpu())


def is_generator(value: Any) -> bool:
    """Whether a value is a generator of Python, numpy or torch."""
    return isinstance(value, random.Random) or (
        type(value).__name__ in ("Generator", "RandomState")
        and (hasattr(value, "bit_generator") or hasattr(value, "get_state"))
    )
