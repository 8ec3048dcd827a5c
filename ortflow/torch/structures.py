"""One structure of a module's inputs: its graphs, their sessions, and its calls. Called by `engine`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ortflow.torch.execution import Graph
from ortflow.torch.function import Call, Plan
from ortflow.torch.graphs import Forward, differentiable, forward_of, pair_of
from ortflow.torch.runtime import sessions_for
from ortflow.torch.settings import Settings
from ortflow.torch.structure import Flat
from ortflow.torch.tracing import Traced, traced
from ortflow.workflow.graph.types import SEED

Tensors = Mapping[str, torch.Tensor]


class Structure:
    """See the module."""

    def __init__(self, found: Traced, forward: Forward, wanted: Sequence[str], settings: Settings) -> None:
        self._traced, self._forward, self._settings = found, forward, settings
        self.sizes = found.sizes
        roots = differentiable(forward, wanted) if wanted else []
        self.differentiable = frozenset(roots)
        self.wanted = tuple(wanted) if roots else ()
        self.results = tuple(dict.fromkeys(each.name for each in found.outputs if each.kind == "graph"))
        self._roots = self._first_roots()
        self._plans: dict[tuple[frozenset[str], int], Plan] = {}
        self._tensors: Tensors = {}

    def _first_roots(self) -> frozenset[str]:
        """The outputs that probably have gradients: of several outputs the one scalar, a loss."""
        types = {value.name: value.type.tensor_type for value in self._forward.model.graph.output}
        scalars = [
            name for name in self.differentiable
            if types[name].HasField("shape") and not types[name].shape.dim
        ]  # fmt: skip
        return frozenset(scalars) if len(scalars) == 1 else self.differentiable

    def run(self, given: Sequence[torch.Tensor], tensors: Tensors) -> Any:
        """Call the module as a graph."""
        feed = {**dict(zip(self._traced.inputs, given, strict=True)), **tensors}
        if SEED in self.plan.forward.inputs or (self.plan.backward and SEED in self.plan.backward.inputs):
            feed[SEED] = torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64)
        self._tensors = tensors
        if self.differentiable:
            sources = [feed[name] for name in self.wanted]
            read = {name: feed[name] for name in self._reads}
            made = dict(zip(self.results, Call.apply(self, self.plan, read, *sources), strict=True))
        else:
            with torch.no_grad():
                made = self.plan.forward.run(feed)
                self.moved(made)
        return self._traced.result([self._output(each, made, given, tensors) for each in self._traced.outputs])

    @property
    def _reads(self) -> list[str]:
        plan = self.plan
        names = [*plan.forward.inputs]
        if plan.backward is not None:
            inner = {*plan.pair.kept, *plan.pair.given.values(), *names}
            names += [name for name in plan.backward.inputs if name not in inner]
        return names

    def _output(self, output: Any, made: Tensors, given: Sequence[torch.Tensor], tensors: Tensors) -> torch.Tensor:
        if output.kind == "input":
            return given[int(output.name)]
        if output.kind == "tensor":
            return tensors[output.name]
        tensor = made[output.name]
        return tensor if tensor.dtype is output.dtype else tensor.to(output.dtype)

    @property
    def plan(self) -> Plan:
        """The plan for the gradients that are expected."""
        return self.plan_for(self._roots)

    def plan_for(self, roots: frozenset[str]) -> Plan:
        """See `Owner`."""
        threads = torch.get_num_threads()
        for known in (roots, self.differentiable):
            if (known, threads) in self._plans:
                return self._plans[known, threads]
        made = self._plans[roots, threads] = plan_of(self._forward, self.wanted, roots, self._traced.tensors, threads)
        return made

    def note(self, roots: frozenset[str]) -> None:
        """See `Owner`."""

    def moved(self, made: Tensors) -> None:
        """See `Owner`."""
        for name, output in self._forward.moved.items():
            self._tensors[name].copy_(made[output].reshape(self._tensors[name].shape))
        for name, count in self._forward.counts.items():
            counter = self._tensors.get(name.removesuffix("running_mean") + "num_batches_tracked")
            if counter is not None:
                counter.add_(count)


def structure_of(
    module: torch.nn.Module, call: Flat, tensors: Tensors, settings: Settings, *, trains: bool, number: int
) -> Structure:
    """Trace and differentiate a call. Raises UserError."""
    found = traced(module, call)
    forward = forward_of(found.model, _frozen(module))
    wanted = []
    if trains:
        read = {value.name for value in forward.model.graph.input}
        wanted = [name for name in found.tensors if tensors[name].requires_grad and name in read]
        wanted += [name for name, t in zip(found.inputs, call.tensors, strict=True) if t.requires_grad]
    return Structure(found, forward, wanted, settings)


def plan_of(
    forward: Forward, wanted: Sequence[str], roots: frozenset[str], tensors: Sequence[str], threads: int
) -> Plan:
    """Build and open the graphs. Raises UserError."""
    pair = pair_of(forward, wanted, [name for name in forward.outputs if name in roots], tensors)
    sessions = sessions_for(threads)
    opened = [
        None if model is None else Graph(sessions.open(model.SerializeToString()), sessions.device)
        for model in (pair.forward, pair.backward)
    ]
    assert opened[0] is not None
    return Plan(pair, opened[0], opened[1])


def _frozen(module: torch.nn.Module) -> set[str]:
    """Running statistics of normalisations in evaluation mode."""
    return {
        f"{name}.{buffer}" if name else buffer
        for name, part in module.named_modules(remove_duplicate=False)
        if isinstance(part, torch.nn.modules.batchnorm._BatchNorm) and not part.training
        for buffer in ("running_mean", "running_var")
    }
