"""Computes attention weights a second time for the backward pass, so that no layer's are kept until then.

They are the largest values of a transformer over long sequences: as many as tokens squared, for each head. Queries and
keys are kept in any case, so a product and a softmax bring the weights back, with the same bits.
"""

from __future__ import annotations

import onnx

from ortflow.workflow.graph.domains import CPU_DOMAIN
from ortflow.workflow.graph.ir.rewriter import Rewriter

LONG = 512
"""Tokens from which on the memory is worth a tenth of the time of a step."""


def put(rewriter: Rewriter, length: int) -> None:
    """Give the backward pass weights of its own where they are the softmax of a product of activations over LONG rows.

    `length` is that of an axis that may vary.
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
    """A product of two values that nodes make, with a large matrix for each of a batch."""
    dims = rewriter.dims(product.output[0])
    made = [name for name in product.input if rewriter.maker(name) is not None]
    own = product.op_type == "Product" and product.domain == CPU_DOMAIN
    if not own or not len(made) == len(product.input) == 2 or dims is None or len(dims) < 3:
        return False
    return all((axis if isinstance(axis, int) else length) >= LONG for axis in dims[-2:])


def _gradients(rewriter: Rewriter, node: onnx.NodeProto, forward: set[int]) -> list[str]:
    """What a node of the backward pass reads of that pass."""
    makers = {name: rewriter.maker(name) for name in node.input}
    return [name for name, maker in makers.items() if maker is not None and id(maker) not in forward]


def _when_there_is(rewriter: Rewriter, gradient: str, value: str) -> str:
    """The value itself, but not before the gradient is there: ONNX Runtime runs what it can as early as it can."""
    prefix = f"{value}.again"
    flat = rewriter("Reshape", gradient, rewriter.ints(-1), output=f"{prefix}.flat")
    ends = [rewriter.ints(0), rewriter.ints(1)]
    first = rewriter("Slice", flat, *ends, output=f"{prefix}.first")
    either = rewriter("IsNaN", first, output=f"{prefix}.either")
    return rewriter("Where", either, value, value, output=prefix)
