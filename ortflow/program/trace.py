"""The record of a program that `ortflow prove` compares: one JSON line per rank and step.

Called by the library in the user's process, before each step and after the last one, if the reply to its greeting
names a folder. The folder's `plan.json` also says when this attempt is struck by a signal and after which step it ends.
Standard library only; torch and numpy through `digests`, if the program has imported them.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ortflow.program import digests, living

PLAN = "plan.json"


class Tracer:
    """Writes the lines of one rank in one attempt.

    Parameters
    ----------
    folder
        The folder of the trace, with its plan: `steps`, after which every rank waits to be ended, and `strike`, null or
        the `step`, `rank` and `signal` of the first attempt.
    """

    def __init__(self, folder: Path, rank: int, attempt: int) -> None:
        self._rank, self._attempt = rank, attempt
        plan = json.loads((folder / PLAN).read_text())
        self._steps: int = plan["steps"]
        self._strike: Mapping[str, Any] | None = plan["strike"] if attempt == 0 else None
        self._path = folder / f"rank-{rank:04d}-attempt-{attempt:02d}.jsonl"
        self._logged: dict[str, Any] = {}

    def log(self, values: Mapping[str, Any]) -> None:
        """Values that the program reports for the step in progress."""
        self._logged.update({name: digests.digest(value) for name, value in values.items()})

    def step(self, step: int, batch: Any, registered: Mapping[str, Any], *, saved: bool) -> None:
        """Record the state after `step` steps, and the batch of the next one; None if there is no next one.

        Does not return after the last step of the plan: the ranks are ended when all have written it. `saved`: a
        checkpoint has been committed, without which nothing is struck.
        """
        record = {
            "rank": self._rank,
            "attempt": self._attempt,
            "step": step,
            "batch": None if batch is None else digests.digest(batch),
            "logged": self._logged,
            "random": random_states(),
            "registered": registered_states(registered),
            "living": {key: list(entry) for key, entry in living.living(sys._getframe(1), registered).items()},
        }
        self._logged = {}
        self._write(record)
        if self._strike is not None and saved and self._strike["rank"] == self._rank and step >= self._strike["step"]:
            name, self._strike = self._strike["signal"], None
            self._write({"struck": name, "step": step})
            os.kill(os.getpid(), getattr(signal, name))
        while step >= self._steps:
            time.sleep(60)

    def _write(self, record: Mapping[str, Any]) -> None:
        with self._path.open("ab") as file:
            file.write((json.dumps(record, separators=(",", ":")) + "\n").encode())


def random_states() -> dict[str, str]:
    """The digests of the process's own generators, by the name of their library."""
    states = {"python": digests.digest(random.getstate())}
    if (numpy := digests.numpy_module()) is not None:
        states["numpy"] = digests.digest(numpy.random.get_state(legacy=False))
    if (torch := digests.torch_module()) is not None:
        states["torch"] = digests.digest(torch.get_rng_state())
        if torch.cuda.is_initialized():
            states["cuda"] = digests.digest(torch.cuda.get_rng_state())
    return states


def registered_states(registered: Mapping[str, Any]) -> dict[str, str]:
    """The digests of the entries of registered state_dicts, by name and path."""
    states = {}
    for name, value in registered.items():
        for path, item in digests.leaves(value.state_dict()):
            states[f"{name}.{path}"] = digests.digest(item)
    return states
