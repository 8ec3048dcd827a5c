"""Gradients of collectives (Shoeybi et al. 2019, Megatron-LM; Rajbhandari et al. 2020, ZeRO)."""

from __future__ import annotations

from ortflow.workflow.graph.autodiff.rule import Backward, Gradients, rule
from ortflow.workflow.graph.domains import CPU_DOMAIN
from ortflow.workflow.graph.ir.collective import OPERATOR, Kind, channel_of, collective, kind_of

_ADJOINT = {
    Kind.COPY: Kind.ALL_REDUCE,
    Kind.ALL_GATHER: Kind.REDUCE_SCATTER,
    Kind.REDUCE_SCATTER: Kind.ALL_GATHER,
}


@rule(OPERATOR, domain=CPU_DOMAIN)
def collective_gradient(backward: Backward) -> Gradients:
    """The sum's gradient is the same on every part: it passes. A maximum stops it."""
    kind = kind_of(backward.node)
    if kind == Kind.ALL_REDUCE:
        yield 0, backward.gradient()
    elif kind in _ADJOINT:
        yield 0, collective(backward, _ADJOINT[kind], backward.gradient(), *channel_of(backward.node))
