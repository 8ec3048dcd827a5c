"""Attention, also as the fused node that `workflow.graph.attention.find` defines, and rotary positions."""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from ortflow.workflow.graph.domains import CUDA_DOMAIN
from ortflow.workflow.graph.ir.edit import attributes_of
from ortflow.workflow.graph.rules.cost import UNCOUNTED
from ortflow.workflow.graph.rules.gradient import Backward, Gradients, gradient_rule
from ortflow.workflow.graph.rules.size import Type, size_rule
from ortflow.workflow.graph.rules.traits import Trait, describe


@gradient_rule("Attention", domain=CUDA_DOMAIN)
def attention(b: Backward) -> Gradients:
    """One node computes the gradients of queries, keys and values. A mask and a seed have none."""
    q, k, v, *extras = b.node.input
    inputs = [b.gradient(), q, k, v, b.output(0), b.saved_output(1), *extras]
    flags = attributes_of(b.node)
    yield from enumerate(b.several("AttentionGrad", 3, *inputs, domain=CUDA_DOMAIN, **flags))


@size_rule("Rotary", "RotaryGrad")
def rotated_size(node: onnx.NodeProto, place: int, types: Mapping[str, Type]) -> Type | None:
    """Heads and tokens are swapped if the input has tokens first."""
    value = types.get(node.input[0]) if node.input else None
    if value is None:
        return None
    kind, shape = value
    swaps = any(flag.name == "tokens_first" and flag.i for flag in node.attribute)
    return kind, (shape[0], shape[2], shape[1], *shape[3:]) if swaps else shape


UNCOUNTED.add("Attention")
describe(["Attention", "RotaryEmbedding"], Trait.HEAVY)
