"""Rule for the fused Attention node, which `workflow.graph.attention.find` defines."""

from __future__ import annotations

from ortflow.workflow.graph.autodiff.rule import Backward, Gradients, rule
from ortflow.workflow.graph.domains import CUDA_DOMAIN
from ortflow.workflow.graph.ir.edit import attributes_of


@rule("Attention", domain=CUDA_DOMAIN)
def attention(b: Backward) -> Gradients:
    """One node computes the gradients of queries, keys and values. A mask and a seed have none."""
    q, k, v, *extras = b.node.input
    inputs = [b.gradient(), q, k, v, b.output(0), b.saved_output(1), *extras]
    flags = attributes_of(b.node)
    yield from enumerate(b.several("AttentionGrad", 3, *inputs, domain=CUDA_DOMAIN, **flags))
