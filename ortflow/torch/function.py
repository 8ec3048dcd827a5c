"""A call of a module as one node of PyTorch's autograd. Called by `structures`.

Everything that the backward graph reads is saved by PyTorch: it frees the values after the backward pass, keeps them
with `retain_graph`, notices changes in place, and applies hooks on saved tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch

from ortflow.torch.leases import Lease
from ortflow.torch.plans import Plan

_TWICE = b"ORTModule has no second derivatives: a gradient that it has computed cannot be differentiated again"


class Owner(Protocol):
    """The structure that a call is of."""

    wanted: Sequence[str]
    """The graph's names of the tensors with gradients, in the order in which the node takes them."""
    results: Sequence[str]
    """The graph's outputs that the node returns, each once."""
    differentiable: frozenset[str]
    """Those that have a gradient."""

    changing: Collection[str]
    """Buffers that a call changes."""

    def plan_for(self, roots: frozenset[str], feed: Mapping[str, torch.Tensor]) -> Plan:
        """A plan whose backward graph takes the gradients of these outputs; `feed` is compared if it is new."""

    def note(self, roots: frozenset[str]) -> None:
        """Remember of which outputs the user takes gradients."""

    def moved(self, outputs: Mapping[str, torch.Tensor]) -> None:
        """Store new values of buffers."""


class Call(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """The node; see the module."""

    @staticmethod
    def forward(  # type: ignore[override, unused-ignore]
        ctx: Any, owner: Owner, plan: Plan, feed: dict[str, torch.Tensor], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Run the forward graph; `tensors` are those of `feed` that have gradients."""
        covers_all = owner.differentiable <= plan.pair.given.keys()
        if not covers_all:
            feed |= {name: feed[name].clone() for name in owner.changing}
        ctx.lease = Lease()
        read = plan.fed(feed)
        outputs = plan.forward.run(read, lease=ctx.lease)
        owner.moved(outputs)
        ctx.owner, ctx.plan = owner, plan
        results = tuple(plan.forward.handed_out(outputs, owner.results))
        ctx.shapes = [(result.shape, result.dtype, result.device) for result in results]
        ctx.sources = [(tensor.shape, tensor.dtype) for tensor in tensors]
        _save(ctx, plan, outputs, read)
        ctx.feed = None if covers_all else (feed, [tensor._version for tensor in feed.values()])
        ctx.mark_non_differentiable(*(
            result for name, result in zip(owner.results, results, strict=True) if name not in owner.differentiable
        ))  # fmt: skip
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Run the backward graph."""
        with torch.no_grad():
            results = Call._backward(ctx, *gradients)
        if not torch.is_grad_enabled():
            return (None, None, None, *results)
        # create_graph: PyTorch's own `once_differentiable` lets second derivatives through as zeros where no gradient
        # that comes in has one.
        with_graph = [gradient.requires_grad_() for gradient in results if gradient is not None]
        marked = iter(torch._C._functions.DelayedError(_TWICE, len(with_graph))(*with_graph) if with_graph else ())
        return (None, None, None, *(None if gradient is None else next(marked) for gradient in results))

    @staticmethod
    def _backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        owner: Owner = ctx.owner
        plan: Plan = ctx.plan
        by = {name: gradient for name, gradient in zip(owner.results, gradients, strict=True) if gradient is not None}
        feed = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
        owner.note(frozenset(by))
        lease: Lease = ctx.lease
        if not by.keys() <= plan.pair.given.keys():
            lease.pending, lease = False, Lease()
            plan, feed = _again(ctx, frozenset(by), lease)
        lease.check()
        assert plan.backward is not None
        for name, (shape, dtype, device) in zip(owner.results, ctx.shapes, strict=True):
            if name in plan.pair.given:
                gradient = by.get(name)
                feed[plan.pair.given[name]] = (
                    torch.zeros(shape, dtype=dtype, device=device) if gradient is None else gradient
                )
        reached = set(plan.pair.wanted) if by else set[str]()
        shapes = {
            f"{name}_grad": shape for name, (shape, _) in zip(owner.wanted, ctx.sources, strict=True) if name in reached
        }
        lease.pending = False
        computed = plan.backward.gradients(feed, shapes) if shapes else {}
        return tuple(
            computed[f"{name}_grad"].to(dtype) if name in reached else None
            for name, (_, dtype) in zip(owner.wanted, ctx.sources, strict=True)
        )


def _save(ctx: Any, plan: Plan, outputs: Mapping[str, torch.Tensor], feed: Mapping[str, torch.Tensor]) -> None:
    if plan.backward is None:
        ctx.names = []
        return
    gradient_inputs = set(plan.pair.given.values())
    ctx.names = [name for name in plan.backward.inputs if name not in gradient_inputs]
    saved_outputs = set(plan.pair.kept)
    # Detached: as PyTorch's operators, the backward pass reads the values of the call if `data` is replaced after it.
    ctx.save_for_backward(*(outputs[name] if name in saved_outputs else feed[name].detach() for name in ctx.names))


def _again(ctx: Any, roots: frozenset[str], lease: Lease) -> tuple[Plan, dict[str, torch.Tensor]]:
    """What the backward graph for other outputs than expected reads: the forward pass is run again."""
    feed, versions = ctx.feed
    if any(tensor._version != version for tensor, version in zip(feed.values(), versions, strict=True)):
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor"
            " that ORTModule was called with, or one of its parameters or buffers"
        )
    plan = ctx.owner.plan_for(roots.union(ctx.plan.pair.given), feed)
    read = plan.fed(feed)
    outputs = plan.forward.run(read, lease=lease)
    assert plan.backward is not None
    gradient_inputs, saved_outputs = set(plan.pair.given.values()), set(plan.pair.kept)
    names = [name for name in plan.backward.inputs if name not in gradient_inputs]
    return plan, {name: outputs[name] if name in saved_outputs else read[name] for name in names}
