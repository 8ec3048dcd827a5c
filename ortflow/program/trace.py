"""The record of a program that `ortflow prove` compares: one JSON line per rank and step.

Called by the library in the user's process if the reply to its greeting names a folder. Standard library only;
torch and numpy through `digests`, if the program has imported them.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ortflow.program import digests, living
from ortflow.workflow.run.strike import Strike


def tracer(hello: Mapping[str, Any], rank: int) -> Tracer:
    """The tracer of a rank, from the reply to its greeting."""
    return Tracer(Path(hello["prove"]), rank, hello["attempt"], hello["newest"])


class Tracer:
    """Writes the lines of one rank in one attempt to a folder, and follows the folder's plan.

    A line has the state after a number of steps, and the batch of the next one. A loop over `Run.steps` calls `before`.
    A loop of the program's own only reports that a step is done (`after`): its next batch is seen when the first module
    of torch is called with it, so the line is written there, or at once in a program that calls none.
    """

    def __init__(self, folder: Path, rank: int, attempt: int, resumed: int | None) -> None:
        self._rank, self._attempt = rank, attempt
        self._strike = Strike(folder, rank, attempt)
        self._path = folder / f"rank-{rank:04d}-attempt-{attempt:02d}.jsonl"
        self._logged: dict[str, str] = {}
        self._values: dict[str, str] = {}
        """Those of the step of the newest line."""
        self._pending: int | None = resumed or 0
        """The step whose line the next call of a module writes."""
        self._written: tuple[int, bool] | None = None
        """The step of the newest line, and whether its batch is known."""
        self._saved = resumed is not None
        self._hook: Any = None

    def log(self, values: Mapping[str, Any]) -> None:
        """Values that the program reports for the step in progress."""
        self._logged.update({name: digests.digest(value) for name, value in values.items()})

    def committed(self) -> None:
        """A checkpoint has been committed: from now on the rank may be struck."""
        self._saved = True

    def before(self, step: int, batch: Any, registered: Mapping[str, Any]) -> None:
        """Record the state after `step` steps, and the batch of the next; None after the last step."""
        self._pending = None
        self._line(step, batch, registered)

    def after(self, step: int) -> None:
        """A step of the program's own loop is done: `step` steps in all."""
        self.watch_modules()
        unseen, self._pending = self._pending is not None, step
        if unseen or step >= self._strike.plan.steps:
            self._line(step, None, {})

    def watch_modules(self) -> None:
        """Write the line of a step when the program calls its first module in the next one."""
        torch = digests.torch_module()
        if torch is not None and self._hook is None:
            self._hook = torch.nn.modules.module.register_module_forward_pre_hook(self._called)

    def close(self) -> None:
        """Look at modules no more."""
        if self._hook is not None:
            self._hook.remove()

    def _called(self, module: Any, inputs: Any) -> None:
        if self._pending is not None and sys.modules["torch"].is_grad_enabled():
            step, self._pending = self._pending, None
            self._line(step, inputs, {})

    def _line(self, step: int, batch: Any, registered: Mapping[str, Any]) -> None:
        line, newest = (step, batch is not None), self._written
        if newest is not None and line <= newest:
            return
        if newest is None or step > newest[0]:
            self._values, self._logged = self._logged, {}
        self._written = line
        record = {
            "rank": self._rank,
            "attempt": self._attempt,
            "step": step,
            "batch": None if batch is None else digests.digest(batch),
            "logged": self._values,
            "random": random_states(),
            "registered": registered_states(registered),
            "living": {key: list(entry) for key, entry in living.living(sys._getframe(2), registered).items()},
        }
        with self._path.open("ab") as file:
            file.write((json.dumps(record, separators=(",", ":")) + "\n").encode())
        self._strike.wait_at_the_end(step)
        self._strike.after(step, saved=self._saved)


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
        state = value.state_dict() if callable(getattr(value, "state_dict", None)) else living.generator_state(value)
        for path, item in digests.leaves(state):
            states[f"{name}.{path}" if path else name] = digests.digest(item)
    return states
