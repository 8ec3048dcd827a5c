"""What a rule is, and what it writes with.

A rule is a generator: for one node of the forward graph it yields, for inputs that need it, the input's place and the
gradient's name. Each is entered in `RULES` by the decorator `rule`; `reverse` looks there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import onnx

from ortflow.workflow.graph import shapes
from ortflow.workflow.graph.writer import Context, Writer

Gradients = Iterator[tuple[int, str]]
"""Pairs of an input's place and the name of the loss's gradient with respect to it, of the input's shape."""


class Backward(Writer):
    """Collects the nodes that compute the gradients of one node's inputs.

    `node` is the forward node, which a rule may give further outputs (`stash`). Names of values in the forward graph
    can be read freely: each is either kept until then or computed again, as ONNX Runtime and `recompute` decide.
    """

    def __init__(self, node: onnx.NodeProto, context: Context, gradients: Sequence[str], path: Collection[str]) -> None:
        super().__init__(node, context)
        self._gradients, self._path = gradients, path
        self._prefix += "_Grad"

    def gradient(self, place: int = 0) -> str:
        """Name of the gradient of an output; empty where the loss does not depend on it."""
        return self._gradients[place] if place < len(self._gradients) else ""

    def wants(self, place: int) -> bool:
        """Whether the gradient of an input is needed."""
        return self.input(place) in self._path

    def stash(self, place: int) -> str:
        """Name of an output of the forward node, which is added to it where it is left out."""
        while len(self.node.output) <= place:
            self.node.output.append("")
        if not self.node.output[place]:
            self.node.output[place] = self.context.fresh(f"{self._prefix}/stash")
        return str(self.node.output[place])

    def summed(self, gradient: str, like: str, whole: str) -> str:
        """`gradient`, of the shape of `whole`, summed over the axes that `like` was broadcast along to that shape."""
        small = shapes.named_shape(self.context.types, like)
        large = shapes.named_shape(self.context.types, whole)
        if small is None or large is None:
            return self._summed_by_shapes(gradient, like, whole)
        extra = len(large) - len(small)
        axes = list(range(extra))
        for axis, dim in enumerate(small, extra):
            if dim == 1:
                if large[axis] != 1:
                    axes.append(axis)
            elif not isinstance(dim, int) and dim != large[axis]:
                # The axis may be 1 in some batches and not in others.
                return self._summed_by_shapes(gradient, like, whole)
        if not axes:
            return gradient
        if axes == list(range(extra)):
            return self("ReduceSum", gradient, self.ints(*axes), keepdims=0)
        kept = self("ReduceSum", gradient, self.ints(*axes), keepdims=1)
        return kept if extra == 0 else self("Squeeze", kept, self.ints(*range(extra)))

    def _summed_by_shapes(self, gradient: str, like: str, whole: str) -> str:
        small, large = self("Shape", like), self("Shape", whole)
        missing = self("Sub", self("Shape", large), self("Shape", small))
        padded = self("Concat", self("Expand", self.ints(1), missing), small, axis=0)
        spread = self("And", self("Equal", padded, self.ints(1)), self("Not", self("Equal", large, self.ints(1))))
        axes = self("Squeeze", self("NonZero", spread), self.ints(0))
        return self("Reshape", self("ReduceSum", gradient, axes, keepdims=1, noop_with_empty_axes=1), small)


Rule = Callable[[Backward], Gradients]
RULES: dict[tuple[str, str], Rule] = {}
"""(Domain, operator) -> its rule."""


def rule(*operators: str, domain: str = "") -> Callable[[Rule], Rule]:
    """Enter a rule for operators of a domain."""

    def enter(function: Rule) -> Rule:
        for operator in operators:
            assert (domain, operator) not in RULES
            RULES[domain, operator] = function
        return function

    return enter
