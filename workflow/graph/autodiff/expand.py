"""Makes a training graph differentiable.

Called by `assembly` on the graph with its loss, before the gradient is built; evaluation and inference graphs keep
the exported operators. Operators without a rule are replaced by operators that have one.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Sequence

import onnx

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.autodiff.branch_models import subgraphs_of
from ortflow.workflow.graph.autodiff.path import Path, gradient_path
from ortflow.workflow.graph.autodiff.rules import RULES
from ortflow.workflow.graph.decompose.operators import DECOMPOSITIONS
from ortflow.workflow.graph.ir import shapes, walk
from ortflow.workflow.graph.ir.edit import replace
from ortflow.workflow.graph.ir.functions import instantiate, schema_function
from ortflow.workflow.graph.ir.order import prune
from ortflow.workflow.graph.ir.origin import inherit
from ortflow.workflow.graph.ir.replacement import MISFITS, Context, context_of, no_gradient
from ortflow.workflow.graph.ir.writer import Fresh
from ortflow.workflow.graph.normalize import tidy
from ortflow.workflow.graph.normalize.opset import OPSET, at_opset_18

_ROUNDS = 8
"""Decompositions use operators that are themselves decomposed, nested no deeper than this."""


def make_differentiable(
    model: onnx.ModelProto, trained: Collection[str], *losses: str
) -> tuple[onnx.ModelProto, list[str]]:
    """Return a copy of a prepared model in which every node between `trained` and `losses` has a gradient, and log
    lines.

    Raises UserError, naming node and operator, if one has no gradient and no decomposition.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    expanded: Counter[str] = Counter()
    view = None
    for _ in range(_ROUNDS):
        if view is None:
            view = _expand_once(copy, trained, losses, expanded)
    for node in _without_gradient(copy, view or _view(copy, trained, losses)):
        raise no_gradient(node, f"{node.op_type} cannot be differentiated")
    tidy.constants_to_initializers(copy)
    prune(copy.graph)
    tidy.name_nodes(copy)
    shapes.infer(copy)
    notes = [f"{count} {op_type} decomposed for training" for op_type, count in sorted(expanded.items())]
    return copy, notes


def undifferentiable(model: onnx.ModelProto, trained: Collection[str], losses: Sequence[str]) -> list[str]:
    """One sentence for each node that prevents a prepared model from being trained for `losses`."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    sentences: list[str] = []
    view = None
    try:
        for _ in range(_ROUNDS):
            if view is None:
                view = _expand_once(copy, trained, losses, Counter())
    except UserError as error:
        sentences.append(error.what)
    nodes = _without_gradient(copy, view or _view(copy, trained, losses))
    return sentences + [walk.called(node) for node in nodes]


_View = tuple[Context, Path]
"""What is known of a graph's values, and its part between the trained parameters and the losses."""


def _view(model: onnx.ModelProto, trained: Collection[str], losses: Sequence[str]) -> _View:
    context = context_of(model)
    return context, gradient_path(model.graph, context.types, trained, losses)


def _without_gradient(model: onnx.ModelProto, view: _View) -> list[onnx.NodeProto]:
    context, path = view
    without_rule = []
    nodes = list(model.graph.node)
    for node in (nodes[place] for place in sorted(path.nodes)):
        if (node.domain, node.op_type) not in RULES:
            without_rule.append(node)
        for branch in subgraphs_of(node, context, path.values) if node.attribute else ():
            without_rule += _without_gradient(branch.model, _view(branch.model, branch.variables, branch.losses))
    return without_rule


def _expand_once(
    model: onnx.ModelProto,
    trained: Collection[str],
    losses: Sequence[str],
    expanded: Counter[str],
    fresh: Fresh | None = None,
) -> _View | None:
    """Decompose each node on the path that needs it, in place; if there is none, what the graph was found to be.

    `fresh` makes the names for a branch, which must differ from those around it.
    """
    view = _view(model, trained, losses)
    context, path = view
    context = dataclasses.replace(context, gradients=path.values, fresh=fresh or context.fresh)
    nodes: list[onnx.NodeProto] = []
    changed = False
    for place, node in enumerate(model.graph.node):
        replacement = _replacement(node, context) if place in path.nodes else None
        for branch in subgraphs_of(node, context, path.values) if node.attribute and place in path.nodes else ():
            if _expand_once(branch.model, branch.variables, branch.losses, expanded, context.fresh) is None:
                replace(branch.graph.node, branch.model.graph.node)
                changed = True
        if replacement is not None:
            expanded[node.op_type] += 1
            inherit(replacement, node)
            changed = True
        nodes += [node] if replacement is None else replacement
    if changed:
        replace(model.graph.node, nodes)
        tidy.cast_like_to_cast(model)
    return None if changed else view


def _replacement(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto] | None:
    """The nodes that replace `node`; None if it can stay."""
    try:
        return _written_out(node, context)
    except MISFITS:
        raise no_gradient(node, "its attributes do not match its inputs") from None


def _written_out(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto] | None:
    if (node.domain, node.op_type) in RULES or node.domain != "":
        return None
    if node.op_type in DECOMPOSITIONS:
        return DECOMPOSITIONS[node.op_type](node, context)
    definition = schema_function(node, OPSET, context.types)
    if definition is None:
        return None
    function, version, defaults = definition
    body = instantiate(function, node, context.fresh, defaults)
    return list(at_opset_18(body, version, context, "model"))
