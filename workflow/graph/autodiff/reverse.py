"""Reverse-mode differentiation: from the loss, or from other outputs, back to the parameters.

The gradient of a value is the sum of the contributions of the nodes that read it. A node's rule is applied when the
gradients of its outputs are complete, which is the case in the reverse order of the forward nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx
from onnx import helper, numpy_helper

from ortflow.workflow.graph.autodiff.choices import drop_choices
from ortflow.workflow.graph.autodiff.path import gradient_path
from ortflow.workflow.graph.autodiff.rules import RULES
from ortflow.workflow.graph.autodiff.sizes import unified
from ortflow.workflow.graph.autodiff.steep import steep_values
from ortflow.workflow.graph.ir import shapes
from ortflow.workflow.graph.ir.edit import rename_values
from ortflow.workflow.graph.ir.named_sizes import named_sizes
from ortflow.workflow.graph.ir.order import prune
from ortflow.workflow.graph.ir.origin import inherit
from ortflow.workflow.graph.ir.replacement import MISFITS, context_of, no_gradient
from ortflow.workflow.graph.rules.gradient import Backward, Constants

LOSS_GRADIENT = "ortflow.loss_grad"
"""Name of the constant 1: the derivative of the loss with respect to itself."""


def differentiate(model: onnx.ModelProto, parameters: Sequence[str], loss: str) -> tuple[onnx.ModelProto, list[str]]:
    """A copy of a forward graph with an additional output `<parameter>_grad` for each parameter the loss depends on.

    `loss` is an fp32 scalar. Returns the copy and those parameters, in the order given. Raises UserError, naming node
    and operator, if a node between a parameter and the loss has no rule, or has a form that its rule does not support.
    """
    return vector_jacobian_product(model, parameters, {loss: LOSS_GRADIENT}, {})


def vector_jacobian_product(
    model: onnx.ModelProto, variables: Sequence[str], constant: Mapping[str, str], incoming: Mapping[str, str]
) -> tuple[onnx.ModelProto, list[str]]:
    """A copy of a forward graph with an additional output `<name>_grad` for each input in `variables` with a gradient.

    Parameters
    ----------
    model
        The forward graph; its values lead to a loss that another graph may compute.
    variables
        Inputs of the graph.
    constant
        Fp32 scalar outputs that are terms of the loss -> the name of the constant 1, their gradient.
    incoming
        Other outputs that the loss depends on -> the name of a new input for the loss's gradient with respect to it.

    Returns
    -------
    tuple
        The copy, and those of `variables` that have a gradient, in the order given.

    Raises
    ------
    UserError
        Naming node and operator, if a node on the way has no rule, or has a form that its rule does not support.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    context = context_of(copy)
    context = replace(context, types=unified(graph, context.types), steep=steep_values(graph, context.tensors))
    path = gradient_path(graph, context.types, variables, [*constant, *incoming])
    graph.initializer.extend(numpy_helper.from_array(np.float32(1), name) for name in constant.values())
    graph.input.extend(helper.make_value_info(name, context.types[output]) for output, name in incoming.items())
    terms: dict[str, list[str]] = {output: [name] for output, name in {**constant, **incoming}.items()}
    nodes: list[onnx.NodeProto] = []
    constants: Constants = {}
    described: dict[str, onnx.TypeProto] = {}

    def total(value: str) -> str:
        """The complete gradient of a value; empty if there is none."""
        if value not in path.values or value not in terms:
            return ""
        names = terms[value]
        while len(names) > 1:
            name = context.fresh(f"{value}_grad/sum")
            nodes.append(helper.make_node("Add", names[:2], [name], name))
            names[:2] = [name]
        return names[0]

    for place in sorted(path.nodes, reverse=True):
        node = graph.node[place]
        gradients = [total(name) for name in node.output]
        if not any(gradients):
            continue
        backward = Backward(node, context, gradients, path.values, constants)
        try:
            rule = RULES[node.domain, node.op_type]
        except KeyError:
            raise no_gradient(node, f"there is no rule for {node.op_type}") from None
        try:
            yielded: list[tuple[int | str, str]] = [*rule(backward)]
        except MISFITS:
            raise no_gradient(node, "its attributes do not match its inputs") from None
        inherit(backward.nodes, node)
        nodes += backward.nodes
        for source, gradient in yielded:
            value = source if isinstance(source, str) else backward.input(source)
            if value in path.values:
                terms.setdefault(value, []).append(gradient)
            if value in context.types:
                described[gradient] = context.types[value]
    reached = [name for name in variables if total(name)]
    renamed = _name_outputs(nodes, {name: total(name) for name in reached})
    graph.node.extend(nodes)
    graph.initializer.extend(constants.values())
    for name in reached:
        graph.output.append(helper.make_value_info(f"{name}_grad", context.types[name]))
    drop_choices(graph, context.types)
    prune(graph)
    outputs = {value.name for value in graph.output}
    new = {name for node in nodes for name in node.output} - outputs
    described = {renamed.get(name, name): value_type for name, value_type in described.items()}
    # In the order of the nodes: a graph's file, whose hash the run directory keeps, is the same in every process.
    sized = (name for node in graph.node if named_sizes(node) for name in node.output)
    output_names = [name for name in sized if name in context.types and name not in outputs]
    new.update(output_names)
    described |= {name: context.types[name] for name in output_names}
    shapes.infer(copy, [helper.make_value_info(name, described[name]) for name in described if name in new])
    return copy, reached


def _name_outputs(nodes: list[onnx.NodeProto], gradients: dict[str, str]) -> dict[str, str]:
    """Rename the gradients of parameters to the names of the outputs, in place. Returns old names with new ones.

    A gradient that two parameters share, or that is a value of the forward graph, gets its name by an Identity.
    """
    makers = {name for node in nodes for name in node.output}
    renamed: dict[str, str] = {}
    for parameter, gradient in gradients.items():
        output = f"{parameter}_grad"
        if gradient in makers and gradient not in renamed:
            renamed[gradient] = output
        else:
            nodes.append(helper.make_node("Identity", [gradient], [output], f"{output}/Identity"))
    for node in nodes:
        rename_values(node, renamed)
    return renamed
