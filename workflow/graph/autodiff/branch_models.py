"""The branches of an If as models of their own, which `expand` decomposes and the rule for If differentiates.

`subgraphs_of` gives them and the body of a loop.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import onnx
from onnx import helper

from ortflow.workflow.graph.autodiff.loop_models import body_of, is_loop
from ortflow.workflow.graph.autodiff.subgraph_models import model_of
from ortflow.workflow.graph.ir import shapes, walk
from ortflow.workflow.graph.ir.replacement import Context, attribute

BRANCHES = ("then_branch", "else_branch")


@dataclass(frozen=True)
class Branch:
    """A branch with what is differentiated in it."""

    name: str
    """`then_branch` or `else_branch`; `body` for a loop."""
    graph: onnx.GraphProto
    """The branch itself, the attribute of this name."""
    model: onnx.ModelProto
    """A copy whose inputs are the values that the branch captures; small constants among these are initializers."""
    captured: frozenset[str]
    """All values that the branch captures."""
    variables: list[str]
    """Those that carry a gradient, sorted."""
    results: list[int]
    """Places of the outputs that the loss depends on."""

    @property
    def losses(self) -> list[str]:
        """Names of these outputs in the branch."""
        return [self.graph.output[place].name for place in self.results]


def branches_of(node: onnx.NodeProto, context: Context, path: Collection[str]) -> Iterator[Branch]:
    """The branches of an If, none for another node; `path` are the values between trained parameters and the loss."""
    if not walk.is_if(node):
        return
    results = [place for place, name in enumerate(node.output) if name in path]
    for name in BRANCHES:
        graph: onnx.GraphProto = attribute(node, name, None)
        captured = frozenset(walk.captured(graph))
        variables = sorted(captured.intersection(path))
        model = _model_of(graph, node, captured, variables, context)
        yield Branch(name, graph, model, captured, variables, results)


def subgraphs_of(node: onnx.NodeProto, context: Context, path: Collection[str]) -> Iterator[Branch]:
    """The branches of an If, or the body of a Loop or Scan; none for another node."""
    yield from branches_of(node, context, path)
    if is_loop(node):
        body = body_of(node, context, path)
        yield Branch("body", body.graph, body.model, body.captured, body.variables, body.results)


def _model_of(
    graph: onnx.GraphProto,
    node: onnx.NodeProto,
    captured: Collection[str],
    variables: Collection[str],
    context: Context,
) -> onnx.ModelProto:
    copy = onnx.GraphProto()
    copy.CopyFrom(graph)
    for value, name in zip(copy.output, node.output, strict=False):
        # Exporters declare sizes that only the other branch has; inference finds those of this one.
        kind = value.type.tensor_type.elem_type or shapes.element_type(context.types, name)
        if value.type.WhichOneof("value") in (None, "tensor_type"):
            value.type.CopyFrom(helper.make_tensor_type_proto(kind, None))
    return model_of(copy, captured, variables, context)
