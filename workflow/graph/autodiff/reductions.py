"""Rules of operators that reduce axes."""

from __future__ import annotations

from ortflow.workflow.graph.autodiff.rule import Backward, Gradients, rule


def spread(b: Backward, value: str) -> str:
    """`value`, of the shape of the node's output, with the axes that the node has reduced, as far as they are known.

    What is returned broadcasts to the shape of the node's input.
    """
    if b.attribute("keepdims", 1) or not b.input(1):
        # Without axes every axis was reduced, or none: a scalar broadcasts to anything.
        return value
    return b("Unsqueeze", value, b.input(1))


@rule("ReduceSum")
def reduce_sum(b: Backward) -> Gradients:
    yield 0, b("Expand", spread(b, b.gradient()), b("Shape", b.input(0)))
