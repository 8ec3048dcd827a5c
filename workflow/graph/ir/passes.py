"""A graph is made by passes, one after the other. Each is checked to leave a whole graph.

ONNX Runtime would only say which output has no node, once the last pass has run. `ortflow inspect --passes` watches
them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import onnx

from ortflow.workflow.errors import OrtflowError, UserError

Watch = Callable[[str, onnx.ModelProto], None]
"""Called behind a pass with its name and the model, which must not be changed or kept."""
State = TypeVar("State", contravariant=True)


def unwatched(name: str, model: onnx.ModelProto) -> None:
    """A Watch that does nothing."""


@dataclass(frozen=True)
class Pass(Generic[State]):
    """One change of a graph."""

    name: str
    change: Callable[[onnx.ModelProto, State], onnx.ModelProto | None]
    """Function of the model, and of what it reads and reports besides. Returns a new model, or None if it has changed
    the one that it got. Raises UserError."""
    effect: str
    """What it changes."""
    needs: tuple[str, ...] = ()
    """Passes that must have run before it, in the same list or in one that it begins behind."""
    wanted: Callable[[State], bool] = lambda state: True
    """Whether the run needs it."""


@dataclass(frozen=True)
class Passes(Generic[State]):
    """The passes of one graph."""

    graph: str
    """Its name in front of those of the passes: `training/gradient`. Passes of the model itself have none."""
    passes: tuple[Pass[State], ...]
    behind: str = ""
    """The pass behind which the graph begins, with the name of its graph; empty for the model itself."""
    has_weights: bool = True
    """Whether all weights are inputs or initializers of the graph, so that every output can be checked."""

    def names(self) -> list[str]:
        """The names of all passes, as a Watch gets them."""
        return [self.named(graph_pass.name) for graph_pass in self.passes]

    def named(self, name: str) -> str:
        """The name of a pass, as a Watch gets it."""
        return f"{self.graph}/{name}" if self.graph else name

    def run(self, model: onnx.ModelProto, state: State, watch: Watch = unwatched) -> onnx.ModelProto:
        """The model behind all of them. The given model may be changed.

        Raises OrtflowError with the name of the pass behind which an output of the graph has no node, or a node waits
        for itself.
        """
        for graph_pass in self.passes:
            if not graph_pass.wanted(state):
                continue
            try:
                result = graph_pass.change(model, state)
            except UserError:
                raise
            except OrtflowError as error:
                raise _fault(graph_pass.name, str(error)) from error
            model = model if result is None else result
            missing = outputs_without_nodes(model.graph) if self.has_weights else []
            if missing:
                rest = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
                raise _fault(graph_pass.name, f"output {missing[0]!r}{rest} of the graph has no node that computes it")
            watch(self.named(graph_pass.name), model)
        return model


def in_place(change: Callable[[onnx.GraphProto], object]) -> Callable[[onnx.ModelProto, object], None]:
    """A function that changes a graph, and needs no more than it, as that of a pass."""

    def run(model: onnx.ModelProto, _: object) -> None:
        change(model.graph)

    return run


def copied(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy: graphs that begin behind the same pass must not change each other's beginning."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy


def outputs_without_nodes(graph: onnx.GraphProto) -> list[str]:
    """Outputs that no node computes and that are neither inputs nor initializers."""
    outputs = [value.name for value in graph.output]
    missing = set(outputs).difference(value.name for value in graph.input)
    missing.difference_update(tensor.name for tensor in graph.initializer)
    # Outputs are made at the end of most graphs, and this runs behind every pass.
    for node in reversed(graph.node):
        if not missing:
            break
        missing.difference_update(node.output)
    return [name for name in outputs if name in missing]


def without_needs(lists: Sequence[Passes[State]]) -> list[str]:
    """A sentence for each pass whose needs do not run before it, and for each graph that begins behind no pass."""
    faults = []
    for passes in lists:
        earlier = ancestors(passes, lists)
        if passes.behind and passes.behind not in earlier:
            faults.append(f"{passes.graph} begins behind {passes.behind!r}, which no list has")
        earlier = [name.rpartition("/")[2] for name in earlier]
        for change in passes.passes:
            faults += [f"{passes.named(change.name)} needs {need}" for need in change.needs if need not in earlier]
            earlier.append(change.name)
    return faults


def ancestors(graph: Passes[State], lists: Sequence[Passes[State]]) -> list[str]:
    """The passes behind which a graph begins, the first of all first."""
    for passes in lists:
        if graph.behind and graph.behind in passes.names():
            names = passes.names()
            return [*ancestors(passes, lists), *names[: names.index(graph.behind) + 1]]
    return []


def _fault(name: str, cause: str) -> OrtflowError:
    return OrtflowError(f"a graph is not whole after {name!r}, which is an error of ortflow: {cause}")
