"""One structure of a module's inputs: its graphs, their sessions, and its calls. Called by `engine`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ortflow.torch.comparison import compare
from ortflow.torch.function import Call
from ortflow.torch.graphs import differentiable, forward_of
from ortflow.torch.plans import Plan, Plans
from ortflow.torch.refusals import FunctionCalled, check_constants
from ortflow.torch.runtime import HALF, Place
from ortflow.torch.settings import Settings
from ortflow.torch.structure import Flat
from ortflow.torch.tracing import Output, Traced, Varying, traced
from ortflow.torch.verify import Point
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.types import SEED

Tensors = Mapping[str, torch.Tensor]
FEWER: tuple[Varying, ...] = ("samples", "none")
"""What may vary where a graph in which all sizes do cannot be made."""


class Structure:
    """See the module."""

    def __init__(self, module: torch.nn.Module, call: Flat, trace: Traced, plans: Plans, *, verify: bool) -> None:
        self._module, self._call, self.traced, self._plans, self._verify = module, call, trace, plans, verify
        self.sizes = trace.sizes
        self.differentiable = frozenset(differentiable(plans.forward, plans.wanted) if plans.wanted else [])
        self.wanted = plans.wanted if self.differentiable else ()
        self.results = tuple(dict.fromkeys(output.name for output in trace.outputs if output.kind == "graph"))
        self.changing = frozenset(plans.forward.moved)
        self._roots = self._first_roots()
        self._noted = False
        self._known: dict[tuple[frozenset[str], int], Plan] = {}
        self._tensors: Tensors = {}

    def _first_roots(self) -> frozenset[str]:
        """The outputs that probably have gradients: of several outputs the one scalar, a loss."""
        types = {value.name: value.type.tensor_type for value in self._plans.forward.model.graph.output}
        scalars = [n for n in self.differentiable if types[n].HasField("shape") and not types[n].shape.dim]
        return frozenset(scalars) if len(scalars) == 1 else self.differentiable

    def run(self, inputs: Sequence[torch.Tensor], tensors: Tensors) -> Any:
        """Call the module as a graph. Raises UserError if a label or an index is out of range."""
        for index_range in self.traced.ranges:
            index_range.check(inputs[index_range.place])
        feed = {**dict(zip(self.traced.inputs, inputs, strict=True)), **tensors}
        plan = self.plan_for(self._roots, feed)
        if SEED in plan.reads:
            # From PyTorch's generator: a resumed run, and activation checkpointing, draw the same masks again.
            feed[SEED] = torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64).to(self._plans.place.device)
        self._tensors = tensors
        if self.differentiable:
            outputs = dict(zip(self.results, Call.apply(self, plan, feed, *map(feed.get, self.wanted)), strict=True))
        else:
            with torch.no_grad():
                every = plan.forward.run(plan.fed(feed))
                self.moved(every)
            outputs = dict(zip(self.results, plan.forward.handed_out(every, self.results), strict=True))
        return self.traced.result([tensor_of(output, outputs, inputs, tensors) for output in self.traced.outputs])

    def plan_for(self, roots: frozenset[str], feed: Tensors) -> Plan:
        """See `Owner`."""
        threads = torch.get_num_threads()
        plan = self._known.get((roots, threads))
        if plan is None:
            plan = self._plans.opened(roots, threads)
            if self._verify:
                with torch.inference_mode(False), torch.set_grad_enabled(bool(self._plans.wanted)):
                    names = set(self.traced.inputs)
                    point = Point([feed[n] for n in self.traced.inputs],
                                 {n: t for n, t in feed.items() if n not in names and n != SEED})  # fmt: skip
                    compare(self._module, self._call, self.traced, self._plans, plan, point, self.differentiable)
            self._known[roots, threads] = plan
        return plan

    def note(self, roots: frozenset[str]) -> None:
        """See `Owner`."""
        if not roots <= self._roots or not self._noted:
            self._roots = roots if roots <= self._roots else roots | self._roots
            self._noted = True

    def moved(self, outputs: Tensors) -> None:
        """See `Owner`."""
        for name, output in self._plans.forward.moved.items():
            self._tensors[name].copy_(outputs[output].reshape(self._tensors[name].shape))
        for name, count in self._plans.forward.counts.items():
            counter = self._tensors.get(name.removesuffix("running_mean") + "num_batches_tracked")
            if counter is not None:
                counter.add_(count)


def tensor_of(output: Output, outputs: Tensors, inputs: Sequence[torch.Tensor], tensors: Tensors) -> torch.Tensor:
    """A tensor of the result."""
    if output.kind == "input":
        return inputs[int(output.name)]
    tensor = tensors[output.name] if output.kind == "tensor" else outputs[output.name]
    return tensor if tensor.dtype is output.dtype else tensor.to(output.dtype)


def structure_of(
    module: torch.nn.Module,
    call: Flat,
    tensors: Tensors,
    settings: Settings,
    called: Callable[[Any], object],
    *,
    place: Place,
    trains: bool,
) -> Structure:
    """Trace a call, differentiate it, and compare it with the module's own. Raises UserError.

    `called` is called when the module has run in PyTorch, before it is restored.
    """
    first = _varying(module, place)
    # Some operators can be exported or differentiated for known sizes only, of which samples are the last to vary.
    attempts: list[Varying] = [first, *(each for each in FEWER if each != first)] if call.tensors else [first]
    for varying in attempts:
        try:
            return _structure(module, call, tensors, settings, called, place=place, trains=trains, varying=varying)
        except UserError as error:
            if varying == attempts[-1] or isinstance(error, FunctionCalled):
                raise _with_fallback(error, settings) from None
    raise AssertionError


def _varying(module: torch.nn.Module, place: Place) -> Varying:
    """ortflow's convolutions in half precision are chosen for known sizes of images."""
    convolves = any(isinstance(part, torch.nn.Conv2d) for part in module.modules())
    return "samples" if place.precision in HALF and convolves else "all"


def _with_fallback(error: UserError, settings: Settings) -> UserError:
    """The error, whose fix also names the keyword of ORTModule that runs the module all the same. Pure."""
    if settings.fallback == "submodule" or "fallback=" in str(error):
        return error
    # An argument of export_for_training. Here, sizes were fixed already.
    fix = "check the sizes of the arguments" if "dynamic_shapes" in (error.fix or "") else error.fix
    way = 'pass fallback="submodule", which leaves the module to PyTorch'
    return UserError(error.what, where=error.where, fix=f"{fix}, or {way}" if fix else way)


def _structure(
    module: torch.nn.Module,
    call: Flat,
    tensors: Tensors,
    settings: Settings,
    called: Callable[[Any], object],
    *,
    place: Place,
    trains: bool,
    varying: Varying,
) -> Structure:
    trace = traced(module, call, called, varying=varying, half=HALF.get(place.precision))
    if trains:
        check_constants(trace.constants_with_gradient)
    forward = forward_of(trace.model, frozen_statistics(module))
    variables = []
    if trains:
        read = {value.name for value in forward.model.graph.input}
        variables = [name for name in trace.tensors if tensors[name].requires_grad and name in read]
        variables += [name for name, t in zip(trace.inputs, call.tensors, strict=True) if t.requires_grad]
    plans = Plans(trace, forward, tuple(variables), settings, place, module.training, frozen_statistics(module))
    structure = Structure(module, call.without_tensors(), trace, plans, verify=settings.verify)
    structure.plan_for(structure._roots, {**dict(zip(trace.inputs, call.tensors, strict=True)), **tensors})
    return structure


def frozen_statistics(module: torch.nn.Module) -> frozenset[str]:
    """Running statistics of normalisations in evaluation mode."""
    return frozenset(
        f"{name}.{buffer}" if name else buffer
        for name, part in module.named_modules(remove_duplicate=False)
        if isinstance(part, torch.nn.modules.batchnorm._BatchNorm) and not part.training
        for buffer in ("running_mean", "running_var")
    )
