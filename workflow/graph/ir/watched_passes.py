"""What one sees of the passes that make the graphs of a run: their order, and the graph behind each.

The functions that apply passes call a `Watch` behind each of them; `ortflow inspect --passes` gives one that records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx

Watch = Callable[[str, onnx.ModelProto], None]
"""Called behind a pass with its name and the model, which must not be changed or kept."""


def unwatched(name: str, model: onnx.ModelProto) -> None:
    """A Watch that does nothing."""


def within(graph: str, watch: Watch) -> Watch:
    """A Watch that names passes as those of a graph: `training/gradient`."""
    return lambda name, model: watch(f"{graph}/{name}", model)


@dataclass(frozen=True)
class NamedPass:
    """One change of a model, in place."""

    name: str
    run: Callable[[onnx.ModelProto, str], Sequence[str] | None]
    """Function of the model and its name in messages; returns lines for the log. Raises UserError."""


def run_passes(passes: Sequence[NamedPass], model: onnx.ModelProto, where: str, watch: Watch) -> list[str]:
    """Apply passes in order; returns their lines for the log."""
    notes: list[str] = []
    for change in passes:
        notes += change.run(model, where) or ()
        watch(change.name, model)
    return notes
