"""Decides whether the graphs of a structure compute what its module computes. Called by `structures`; see `verify`."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch

from ortflow.exporter.random import NotFixed
from ortflow.torch import verify
from ortflow.torch.plans import Plan, Plans
from ortflow.torch.proofs import is_proven, key_of, remember
from ortflow.torch.runtime import HALF
from ortflow.torch.structure import Flat
from ortflow.torch.tracing import Traced
from ortflow.torch.verify import Point
from ortflow.workflow.graph.types import SEED


def compare(
    module: torch.nn.Module,
    call: Flat,
    trace: Traced,
    plans: Plans,
    plan: Plan,
    call_point: Point,
    differentiable: Collection[str],
) -> None:
    """Compare a step with the module's own. Raises UserError if they differ; warns if they cannot be compared."""
    pair = plan.pair
    key = key_of([trace.model, pair.forward, pair.backward], plan.kernels, [*plans.wanted, *sorted(pair.given)])
    if is_proven(key):
        return
    deterministic = plans.without_randomness(plan) if plans.forward.is_random else plan
    if deterministic is None:
        _warn(module, "it draws random numbers that have no fixed form")
        return
    checked = deterministic
    roots = [output.kind == "graph" and output.name in pair.given for output in trace.outputs]
    names = [f"output {place}" for place in range(len(roots))] if len(roots) > 1 else ["the output"]

    def faults_at(point: Point, *, double: bool) -> dict[str, str]:
        if plans.place.precision in HALF:
            half = HALF[plans.place.precision]
            exact = verify.eager(module, call, point, plans.wanted, None, roots)
            single = verify.eager(module, call, point, plans.wanted, exact.weights, roots, autocast=half)
            actual = _step(trace, plans, checked, point, exact, differentiable)
            return verify.differences(actual, single, exact, names=names, allowed=verify.HALF)
        single = verify.eager(module, call, point, plans.wanted, None, roots)
        actual = _step(trace, plans, checked, point, single, differentiable)
        exact = single
        if double and verify.is_small(call_point.tensors):
            with contextlib.suppress(Exception):  # a module may mix precisions
                exact = verify.eager(module, call, point, plans.wanted, single.weights, roots, double=True)
        allowed = verify.HALF if plans.place.precision == "tf32" else verify.Tolerance()
        allowed = replace(allowed, takes_single_for_exact=not double)
        return verify.differences(actual, single, exact, names=names, allowed=allowed)

    try:
        faults = faults_at(call_point, double=False)
    except NotFixed as error:
        _warn(module, f"{error} is random")
        return
    for noise in (0.0, *verify.NOISE) if faults else ():
        at_point = faults_at(verify.moved(call_point, noise) if noise else call_point, double=True)
        faults = {name: fault for name, fault in faults.items() if name in at_point}
        if not faults:
            break
    if faults:
        raise verify.refusal(type(module).__name__, faults, plans.forward.model)
    remember(key)


def _step(
    trace: Traced, plans: Plans, plan: Plan, point: Point, reference: verify.Step, differentiable: Collection[str]
) -> verify.Step:
    """A step of the graphs, with the weights of a step of PyTorch's."""
    from ortflow.torch.structures import tensor_of

    feed = {**dict(zip(trace.inputs, point.given, strict=True)), **point.tensors}
    feed[SEED] = torch.zeros(1, dtype=torch.int64, device=plans.place.device)
    gradients: dict[str, Any] = dict.fromkeys(plans.wanted)
    with torch.no_grad():
        feed = plan.fed(feed)
        values = plan.forward.run(feed)
        if plan.backward is not None:
            by: dict[str, torch.Tensor] = {}
            for output, weight in zip(trace.outputs, reference.weights, strict=False):
                if output.kind == "graph" and output.name in plan.pair.given and weight is not None:
                    by[output.name] = by[output.name] + weight if output.name in by else weight
            read = {**feed, **{name: values[name] for name in plan.pair.kept}}
            read |= {into: by.get(name, torch.zeros_like(values[name])) for name, into in plan.pair.given.items()}
            computed = plan.backward.run(read)
            gradients |= {name: verify.array(computed[f"{name}_grad"]) for name in plan.pair.wanted}
    tensors = [tensor_of(output, values, point.given, point.tensors) for output in trace.outputs]
    return verify.Step(
        [verify.array(tensor) for tensor in tensors],
        gradients,
        {
            name: verify.array(values[output].reshape(point.tensors[name].shape))
            for name, output in plans.forward.moved.items()
        },
        [],
        [output.name in differentiable if output.kind == "graph" else tensor.requires_grad
         for output, tensor in zip(trace.outputs, tensors, strict=True)],
        (trace.constants, trace.spec),
    )  # fmt: skip


def _warn(module: torch.nn.Module, reason: str) -> None:
    warnings.warn(f"{type(module).__name__} is not compared with PyTorch: {reason}", stacklevel=8)
