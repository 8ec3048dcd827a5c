"""Recomputes attention weights for the backward pass, so that they are not kept for every layer.

They are the largest values of a transformer over long sequences: tokens squared, for each head. Queries and keys are
kept anyway, so a product and a softmax restore the weights bit for bit.
"""

from __future__ import annotations

import onnx

from ortflow.workflow.graph.domains import CPU_DOMAIN
from ortflow.workflow.graph.ir.rewriter import Rewriter

LONG = 512
"""Number of tokens from which on the saved memory justifies a tenth of a step's time."""


def put(rewriter: Rewriter, length: int) -> None:
    """Recompute weights for the backward pass if they are a softmax over at least LONG keys.

    `length` is the length of an axis that varies.
    """
    forward = rewriter.needed_by([name for name in rewriter.outputs if not name.endswith("_grad")])
    for softmax in rewriter.nodes("Softmax", CPU_DOMAIN):
        product, weights = rewriter.maker(softmax.input[0]), softmax.output[0]
        if product is None or id(softmax) not in forward or not _is_attention(rewriter, product, length):
            continue
        later = [node for node in rewriter.readers(weights) if id(node) not in forward]
        gradient = next((name for node in later for name in _gradients(rewriter, node, forward)), None)
        if gradient is None:
            continue
        queries = product.input[0]
        scores = rewriter.repeat(product, {queries: _when_there_is(rewriter, gradient, queries)})
        again = rewriter.repeat(softmax, {softmax.input[0]: scores})
        for node in later:
            rewriter.redirect(node, weights, again)


def _is_attention(rewriter: Rewriter, product: onnx.NodeProto, length: int) -> bool:
    """Whether it is a batched product of two computed values with a large result matrix."""
    dims = rewriter.dims(product.output[0])
    factors = [name for name in product.input if rewriter.maker(name) is not None]
    is_kernel = product.op_type == "Product" and product.domain == CPU_DOMAIN
    if not is_kernel or not len(factors) == len(product.input) == 2 or dims is None or len(dims) < 3:
        return False
    return all((axis if isinstance(axis, int) else length) >= LONG for axis in dims[-2:])


def _gradients(rewriter: Rewriter, node: onnx.NodeProto, forward: set[int]) -> list[str]:
    """Inputs of a backward node that are computed by the backward pass."""
    makers = {name: rewriter.maker(name) for name in node.input}
    return [name for name, maker in makers.items() if maker is not None and id(maker) not in forward]


def _when_there_is(rewriter: Rewriter, gradient: str, value: str) -> str:
    """The value itself, delayed until the gradient exists: ONNX Runtime runs nodes as early as it can."""
    prefix = f"{value}.again"
    flat = rewriter("Reshape", gradient, rewriter.ints(-1), output=f"{prefix}.flat")
    ends = [rewriter.ints(0), rewriter.ints(1)]
    first = rewriter("Slice", flat, *ends, output=f"{prefix}.first")
    either = rewriter("IsNaN", first, output=f"{prefix}.either")
    return rewriter("Where", either, value, value, output=prefix)
