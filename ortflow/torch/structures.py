"""One structure of a module's inputs: its graphs, their sessions, and its calls. Called by `engine`."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ortflow.export_random import NotFixed
from ortflow.torch import verify
from ortflow.torch.execution import Graph
from ortflow.torch.function import Call, Plan
from ortflow.torch.graphs import Forward, differentiable, forward_of, pair_of
from ortflow.torch.proofs import is_proven, key_of, remember
from ortflow.torch.runtime import sessions_for
from ortflow.torch.settings import Settings
from ortflow.torch.structure import Flat
from ortflow.torch.tracing import Traced, traced
from ortflow.workflow.graph.types import SEED

Tensors = Mapping[str, torch.Tensor]


class Structure:
    """See the module."""

    def __init__(self, found: Traced, forward: Forward, wanted: Sequence[str], settings: Settings) -> None:
        self.traced, self.forward, self._settings = found, forward, settings
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
        types = {value.name: value.type.tensor_type for value in self.forward.model.graph.output}
        scalars = [
            name for name in self.differentiable
            if types[name].HasField("shape") and not types[name].shape.dim
        ]  # fmt: skip
        return frozenset(scalars) if len(scalars) == 1 else self.differentiable

    def step(self, plan: Plan, point: verify.Point, like: verify.Step) -> verify.Step:
        """A step of a plan, with the weights of a step of PyTorch's."""
        feed = {**dict(zip(self.traced.inputs, point.given, strict=True)), **point.tensors}
        feed |= {SEED: torch.zeros(1, dtype=torch.int64)}
        outputs = self.traced.outputs
        gradients: dict[str, Any] = dict.fromkeys(self.wanted)
        with torch.no_grad():
            made = plan.forward.run(feed)
            if plan.backward is not None:
                by: dict[str, torch.Tensor] = {}
                for each, weight in zip(outputs, like.weights, strict=False):
                    if each.kind == "graph" and each.name in plan.pair.given and weight is not None:
                        by[each.name] = by[each.name] + weight if each.name in by else weight
                read = {**feed, **{name: made[name] for name in plan.pair.kept}}
                read |= {plan.pair.given[name]: by.get(name, torch.zeros_like(made[name])) for name in plan.pair.given}
                computed = plan.backward.run(read)
                gradients |= {name: verify.array(computed[f"{name}_grad"]) for name in plan.pair.wanted}
        tensors = [self._output(each, made, point.given, point.tensors) for each in outputs]
        return verify.Step(
            [verify.array(tensor) for tensor in tensors],
            gradients,
            {
                name: verify.array(made[output].reshape(point.tensors[name].shape))
                for name, output in self.forward.moved.items()
            },
            [],
            [each.name in self.differentiable if each.kind == "graph" else tensor.requires_grad
             for each, tensor in zip(outputs, tensors, strict=True)],
            (self.traced.constants, self.traced.spec),
        )  # fmt: skip

    def run(self, given: Sequence[torch.Tensor], tensors: Tensors) -> Any:
        """Call the module as a graph."""
        feed = {**dict(zip(self.traced.inputs, given, strict=True)), **tensors}
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
        return self.traced.result([self._output(each, made, given, tensors) for each in self.traced.outputs])

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
        made = self._plans[roots, threads] = plan_of(self.forward, self.wanted, roots, self.traced.tensors, threads)
        return made

    def note(self, roots: frozenset[str]) -> None:
        """See `Owner`."""

    def moved(self, made: Tensors) -> None:
        """See `Owner`."""
        for name, output in self.forward.moved.items():
            self._tensors[name].copy_(made[output].reshape(self._tensors[name].shape))
        for name, count in self.forward.counts.items():
            counter = self._tensors.get(name.removesuffix("running_mean") + "num_batches_tracked")
            if counter is not None:
                counter.add_(count)


def structure_of(
    module: torch.nn.Module,
    call: Flat,
    tensors: Tensors,
    settings: Settings,
    called: Callable[[], object],
    *,
    trains: bool,
) -> Structure:
    """Trace, differentiate and compare a call. Raises UserError.

    `called` is called when the module has run in PyTorch, before it is restored.
    """
    found = traced(module, call, called)
    forward = forward_of(found.model, _frozen(module))
    wanted = []
    if trains:
        read = {value.name for value in forward.model.graph.input}
        wanted = [name for name in found.tensors if tensors[name].requires_grad and name in read]
        wanted += [name for name, t in zip(found.inputs, call.tensors, strict=True) if t.requires_grad]
    structure = Structure(found, forward, wanted, settings)
    if settings.verify:
        compare(module, call, tensors, structure)
    return structure


def compare(module: torch.nn.Module, call: Flat, tensors: Tensors, structure: Structure) -> None:
    """Compare a step with the module's own; see `verify`. Raises UserError if they differ."""
    plan = structure.plan
    kernels = sessions_for(torch.get_num_threads()).kernels
    key = key_of(
        (structure.traced.model, plan.pair.forward, plan.pair.backward),
        kernels,
        [*structure.wanted, *sorted(plan.pair.given)],
    )
    if is_proven(key):
        return
    if structure.forward.is_random:
        model = verify.fixed(structure.traced.model)
        if model is None:
            warnings.warn(
                f"{type(module).__name__} is not compared with PyTorch: it draws random numbers", stacklevel=6
            )
            return
        forward = forward_of(model, _frozen(module))
        plan = plan_of(forward, structure.wanted, frozenset(plan.pair.given), structure.traced.tensors, plan.threads)
    roots = [each.kind == "graph" and each.name in plan.pair.given for each in structure.traced.outputs]
    names = [f"output {place}" for place in range(len(roots))] if len(roots) > 1 else ["the output"]
    here = verify.Point(call.tensors, tensors)

    def faults_at(point: verify.Point, *, double: bool) -> dict[str, str]:
        single = verify.eager(module, call, point, structure.wanted, None, roots)
        actual = structure.step(plan, point, single)
        exact = single
        if double and verify.is_small(tensors):
            with contextlib.suppress(Exception):  # a module may mix precisions
                exact = verify.eager(module, call, point, structure.wanted, single.weights, roots, double=True)
        return verify.differences(actual, single, exact, names=names)

    try:
        faults = faults_at(here, double=False)
    except NotFixed as error:
        warnings.warn(f"{type(module).__name__} is not compared with PyTorch: {error} is random", stacklevel=6)
        return
    for noise in (0.0, *verify.NOISE) if faults else ():
        found = faults_at(verify.moved(here, noise) if noise else here, double=True)
        faults = {what: fault for what, fault in faults.items() if what in found}
        if not faults:
            break
    if faults:
        raise verify.refusal(type(module).__name__, faults, structure.forward.model)
    remember(key)


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
    return Plan(pair, opened[0], opened[1], threads)


def _frozen(module: torch.nn.Module) -> set[str]:
    """Running statistics of normalisations in evaluation mode."""
    return {
        f"{name}.{buffer}" if name else buffer
        for name, part in module.named_modules(remove_duplicate=False)
        if isinstance(part, torch.nn.modules.batchnorm._BatchNorm) and not part.training
        for buffer in ("running_mean", "running_var")
    }
