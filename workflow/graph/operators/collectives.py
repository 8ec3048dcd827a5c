"""Collectives (Shoeybi et al. 2019, Megatron-LM; Rajbhandari et al. 2020, ZeRO)."""

from __future__ import annotations

from collections.abc import Mapping

import onnx
from onnx import TensorProto

from ortflow.workflow.graph.domains import CPU_DOMAIN, CUDA_DOMAIN
from ortflow.workflow.graph.ir import shared_entropy
from ortflow.workflow.graph.ir.collective import OPERATOR, Kind, channel_of, collective, kind_of
from ortflow.workflow.graph.ir.edit import attributes_of
from ortflow.workflow.graph.rules.gradient import Backward, Gradients, gradient_rule
from ortflow.workflow.graph.rules.size import Type, size_rule

_ADJOINT = {
    Kind.COPY: Kind.ALL_REDUCE,
    Kind.ALL_GATHER: Kind.REDUCE_SCATTER,
    Kind.REDUCE_SCATTER: Kind.ALL_GATHER,
}


@gradient_rule(OPERATOR, domain=CPU_DOMAIN)
def collective_gradient(backward: Backward) -> Gradients:
    """The sum's gradient is the same on every part: it passes. A maximum stops it."""
    kind = kind_of(backward.node)
    if kind == Kind.ALL_REDUCE:
        yield 0, backward.gradient()
    elif kind in _ADJOINT:
        yield 0, collective(backward, _ADJOINT[kind], backward.gradient(), *channel_of(backward.node))


@gradient_rule(shared_entropy.OPERATOR, domain=CUDA_DOMAIN)
def shared_cross_entropy(backward: Backward) -> Gradients:
    """Each part's scores have a gradient of their own, which needs the sum over all parts alone."""
    (labels, scores), flags = backward.node.input, attributes_of(backward.node)
    label_flags = {name: flags[name] for name in shared_entropy.LABELS if name in flags}
    inputs = [labels, backward.gradient(), scores, backward.saved_output(1)]
    yield 1, backward(shared_entropy.GRADIENT, *inputs, domain=CUDA_DOMAIN, **label_flags)


@size_rule(OPERATOR)
def exchanged_size(node: onnx.NodeProto, place: int, types: Mapping[str, Type]) -> Type | None:
    """Gathered and scattered along the first axis. The second output orders the nodes."""
    value = types.get(node.input[0]) if node.input else None
    if value is None:
        return None
    if place:
        return TensorProto.FLOAT, ()
    (element_type, shape), kind, (_, parts) = value, kind_of(node), channel_of(node)
    if kind == Kind.ALL_GATHER:
        return element_type, (shape[0] * parts, *shape[1:])
    return (element_type, (shape[0] // parts, *shape[1:])) if kind == Kind.REDUCE_SCATTER else value


@size_rule("Shards")
def token_size(node: onnx.NodeProto, place: int, types: Mapping[str, Type]) -> Type | None:
    """The first output is a token that orders the nodes."""
    return (TensorProto.FLOAT, (1,)) if place == 0 else None
