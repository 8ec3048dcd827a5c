"""Which program differentiates graphs: ONNX Runtime's gradient builder, or this package's own rules.

The builder is part of the training package alone (onnxruntime-training), so the rules serve wherever it is missing.
`build`, `expand` and the export comparison ask `differentiator`; nothing else depends on which of the two it is.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import onnx

from ortflow.workflow.graph import differentiate, gradients
from ortflow.workflow.graph.autodiff import rules
from ortflow.workflow.graph.autodiff.compose import compose
from ortflow.workflow.graph.autodiff.reverse import differentiate as reverse
from ortflow.workflow.graph.child import Child
from ortflow.workflow.graph.decompose_images import dilated_pads
from ortflow.workflow.graph.repair import REPAIRS, Repair
from ortflow.workflow.graph.separate import separate_inputs
from ortflow.workflow.graph.stash import add_stashes
from ortflow.workflow.runtimes import BUILDER, RULES, differentiator_name


class Differentiator(Protocol):
    """Makes the gradient graph of a forward graph; see the two below."""

    name: str
    """What the graphs of a run are recorded to be made by."""

    repairs: Mapping[str, Repair]
    """Operator of ONNX's own domain -> other nodes for the forms that are not differentiated or computed right."""

    def has_gradient(self, domain: str, op_type: str) -> bool:
        """Whether the operator can be differentiated as it is."""
        ...

    def separate(self, model: onnx.ModelProto, trained: Collection[str], loss: str) -> None:
        """Last changes to an expanded graph, in place."""
        ...

    def gradient(
        self, child: Child, forward: onnx.ModelProto, loss: str, parameters: Sequence[str]
    ) -> tuple[onnx.ModelProto, list[str]]:
        """A copy with the further outputs `<parameter>_grad`, and the parameters that the loss depends on.

        Raises UserError, naming operator and node.
        """
        ...

    def finish(self, model: onnx.ModelProto) -> onnx.ModelProto:
        """The model, what the runtime may have no kernels for written out: the last change to a graph of training."""
        ...


class Builder:
    """ONNX Runtime's GradientGraphBuilder, run in the child process."""

    name = BUILDER
    repairs: Mapping[str, Repair] = REPAIRS

    def has_gradient(self, domain: str, op_type: str) -> bool:
        """See the protocol."""
        return gradients.has_gradient(domain, op_type)

    def separate(self, model: onnx.ModelProto, trained: Collection[str], loss: str) -> None:
        """See the protocol."""
        separate_inputs(model, trained, loss)

    def gradient(
        self, child: Child, forward: onnx.ModelProto, loss: str, parameters: Sequence[str]
    ) -> tuple[onnx.ModelProto, list[str]]:
        """See the protocol."""
        copy = onnx.ModelProto()
        copy.CopyFrom(forward)
        add_stashes(copy.graph)
        return differentiate.gradient_graph(child, copy, loss, parameters)

    def finish(self, model: onnx.ModelProto) -> onnx.ModelProto:
        """As it is: the training package has a kernel for each node that its builder makes."""
        return model


class Rules:
    """The rules of `autodiff`, whose graphs run on every ONNX Runtime."""

    name = RULES
    repairs: Mapping[str, Repair] = {"Conv": dilated_pads}

    def has_gradient(self, domain: str, op_type: str) -> bool:
        """See the protocol."""
        return (domain, op_type) in rules.RULES

    def separate(self, model: onnx.ModelProto, trained: Collection[str], loss: str) -> None:
        """Nothing: a rule writes the gradients that are needed, and each under a name of its own."""

    def gradient(
        self, child: Child, forward: onnx.ModelProto, loss: str, parameters: Sequence[str]
    ) -> tuple[onnx.ModelProto, list[str]]:
        """See the protocol."""
        return reverse(forward, parameters, loss)

    def finish(self, model: onnx.ModelProto) -> onnx.ModelProto:
        """See the protocol."""
        return compose(model)


@functools.cache
def differentiator() -> Differentiator:
    """The one for the installed ONNX Runtime."""
    return Builder() if differentiator_name() == BUILDER else Rules()
