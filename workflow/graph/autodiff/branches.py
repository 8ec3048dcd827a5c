"""Rule for If.

The gradient is an If of the same condition. Each of its branches computes the forward values that it needs again, and
from them the gradients of the captured values. Kept values would have to be outputs of both branches, which have
different ones.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx
from onnx import helper, numpy_helper

from ortflow.workflow.graph.autodiff.branch_models import Branch, branches_of
from ortflow.workflow.graph.autodiff.compose import compose
from ortflow.workflow.graph.ir import shapes, walk
from ortflow.workflow.graph.ir.edit import make_outputs, rename_values, replace
from ortflow.workflow.graph.ir.order import prune
from ortflow.workflow.graph.ir.replacement import attribute
from ortflow.workflow.graph.normalize.randomness import RANDOM
from ortflow.workflow.graph.rules.gradient import Backward, GradientsByName, gradient_rule


@gradient_rule("If")
def branches(b: Backward) -> GradientsByName:
    """Yields the name of each captured value that has a gradient in a branch; it is zero if the other one is taken."""
    parts = {branch.name: _Part(b, branch) for branch in branches_of(b.node, b.context, b.path)}
    values = sorted({value for part in parts.values() for value in part.gradients})
    if not values:
        return
    graphs = {name: part.graph_of(values) for name, part in parts.items()}
    results = b.several("If", len(values), b.input(0), **graphs)
    yield from zip(values, results, strict=True)


class _Part:
    """One branch of the gradient."""

    def __init__(self, b: Backward, branch: Branch) -> None:
        # The rules, of which this is one, are imported by `reverse`.
        from ortflow.workflow.graph.autodiff.reverse import vector_jacobian_product

        self._b = b
        model = branch.model
        check_statistics(b, model.graph)
        names = {b.context.fresh(f"{b.node.name}/result"): place for place in branch.results if b.gradient(place)}
        # Two outputs may be one value, and an output may be a captured one.
        for name, place in names.items():
            model.graph.node.append(helper.make_node("Identity", [model.graph.output[place].name], [name]))
        described = [helper.make_value_info(name, model.graph.output[place].type) for name, place in names.items()]
        make_outputs(model.graph, described)
        incoming = {name: b.context.fresh(f"{name}_gradient") for name in names}
        derived, reached = vector_jacobian_product(model, branch.variables, {}, incoming)
        outputs = {f"{value}_grad": value for value in reached}
        make_outputs(derived.graph, [value for value in derived.graph.output if value.name in outputs])
        prune(derived.graph)
        # What later rewrites the main graph leaves branches as they are.
        graph = compose(derived).graph
        check_repeatable(b, graph)
        replace(graph.initializer, [tensor for tensor in graph.initializer if tensor.name not in branch.captured])
        renamed = {incoming[name]: b.gradient(place) for name, place in names.items()}
        renamed |= {name: b.context.fresh(name) for name in made_in(graph)}
        for node in graph.node:
            rename_values(node, renamed)
        for tensor in graph.initializer:
            tensor.name = renamed[tensor.name]
        self._nodes, self._constants = list(graph.node), list(graph.initializer)
        self.gradients = {value: renamed[name] for name, value in outputs.items()}
        """Captured value -> its gradient in this branch, for those that have one."""

    def graph_of(self, values: Collection[str]) -> onnx.GraphProto:
        """The branch, whose outputs are the gradients of `values`."""
        context = self._b.context
        outputs = []
        for value in values:
            kind = shapes.element_type(context.types, value) or onnx.TensorProto.FLOAT
            if value not in self.gradients:
                self.gradients[value] = self._zeros(value, kind)
            described = context.types.get(value) or helper.make_tensor_type_proto(kind, None)
            outputs.append(helper.make_value_info(self.gradients[value], described))
        return helper.make_graph(self._nodes, context.fresh("gradient"), [], outputs, self._constants)

    def _zeros(self, value: str, kind: int) -> str:
        zero = numpy_helper.from_array(np.zeros(1, helper.tensor_dtype_to_np_dtype(kind)))
        shape, zeros = (self._b.context.fresh(f"{value}_grad/{operator}") for operator in ("Shape", "ConstantOfShape"))
        self._nodes.append(helper.make_node("Shape", [value], [shape], shape))
        self._nodes.append(helper.make_node("ConstantOfShape", [shape], [zeros], zeros, value=zero))
        return zeros


def made_in(graph: onnx.GraphProto) -> list[str]:
    """The values that a graph and its subgraphs make, and their constants."""
    names = [tensor.name for tensor in graph.initializer]
    for node in graph.node:
        names += filter(None, node.output)
        for inner in walk.subgraphs(node):
            names += [*(value.name for value in inner.input), *made_in(inner)]
    return list(dict.fromkeys(names))


def check_statistics(b: Backward, branch: onnx.GraphProto, region: str = "one of its branches") -> None:
    """Raises UserError for statistics of a batch: `objective.modes` updates and uses only those of the main graph."""
    for node in walk.nodes(branch.node):
        if node.op_type == "BatchNormalization" and node.domain == "" and attribute(node, "training_mode", 0):
            raise b.refusal(f"{walk.called(node)} in {region} is in training mode")


def check_repeatable(b: Backward, gradient: onnx.GraphProto, region: str = "one of its branches") -> None:
    """Raises UserError if a subgraph of the gradient draws random numbers again, which would be others."""
    for node in walk.nodes(gradient.node):
        # ONNX Runtime has forms of Dropout, such as BiasDropout.
        dropout = node.op_type.endswith("Dropout") and (node.domain != "" or _draws(node, gradient))
        if dropout or node.op_type in RANDOM:
            raise b.refusal(f"{walk.called(node)} in {region} would draw other random numbers again")


def _draws(node: onnx.NodeProto, graph: onnx.GraphProto) -> bool:
    """Whether a Dropout is, or may be, in training mode."""
    mode = [*node.input, "", ""][2]
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    for inner in walk.nodes(graph.node):
        if inner.op_type == "Constant" and inner.output[0] == mode:
            tensors[mode] = attribute(inner, "value", None)
    tensor = tensors.get(mode)
    return bool(mode) and (tensor is None or bool(numpy_helper.to_array(tensor).any()))
