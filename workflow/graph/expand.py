"""Makes a training graph one that ONNX Runtime can differentiate, and differentiates right.

Called by `build` on the graph with its loss, before the gradient is built; evaluation and inference graphs stay as
they were exported. Operators without a gradient are written out by others; operators whose gradient ONNX Runtime
gets wrong in the form they have are brought to one that it gets right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

import onnx

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph import shapes, tidy, walk
from ortflow.workflow.graph.decompose import DECOMPOSITIONS
from ortflow.workflow.graph.functions import instantiate, replace_nodes, schema_function
from ortflow.workflow.graph.gradients import NAMES_EVERY_GRADIENT, has_gradient
from ortflow.workflow.graph.opset import OPSET, at_opset_18
from ortflow.workflow.graph.origin import inherit
from ortflow.workflow.graph.path import gradient_path
from ortflow.workflow.graph.repair import REPAIRS
from ortflow.workflow.graph.writer import MISFITS, Context, Writer, context_of, copy_of, no_gradient

_ROUNDS = 8
"""Decompositions use operators that are decomposed themselves; none is nested deeper."""


def make_differentiable(
    model: onnx.ModelProto, trained: Collection[str], loss: str
) -> tuple[onnx.ModelProto, list[str]]:
    """A copy of a prepared model in which every node between `trained` and `loss` has a gradient, and log lines.

    Raises UserError naming node and operator where one has none and cannot be written out.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    expanded: Counter[str] = Counter()
    for _ in range(_ROUNDS):
        if not _expand_once(copy, trained, [loss], expanded):
            break
    check_differentiable(copy, trained, loss)
    _separate_fixed_inputs(copy, trained, loss)
    tidy.constants_to_initializers(copy)
    tidy.drop_unused(copy)
    tidy.name_nodes(copy)
    shapes.infer(copy)
    notes = [f"{count} {op_type} written out for training" for op_type, count in sorted(expanded.items())]
    return copy, notes


def check_differentiable(model: onnx.ModelProto, trained: Collection[str], loss: str) -> None:
    """Raises UserError, naming node and operator, where ONNX Runtime has no gradient between `trained` and `loss`."""
    for node in _without_gradient(model, trained, [loss]):
        raise no_gradient(node, f"ONNX Runtime cannot differentiate {node.op_type}")


def undifferentiable(model: onnx.ModelProto, trained: Collection[str], losses: Sequence[str]) -> list[str]:
    """A sentence for each node that keeps a prepared model from being trained for `losses`."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    found: list[str] = []
    for _ in range(_ROUNDS):
        try:
            if not _expand_once(copy, trained, losses, Counter()):
                break
        except UserError as error:
            found.append(error.what)
            break
    return found + [walk.called(node) for node in _without_gradient(copy, trained, losses)]


def _without_gradient(model: onnx.ModelProto, trained: Collection[str], losses: Sequence[str]) -> list[onnx.NodeProto]:
    path = gradient_path(model.graph, shapes.value_types(model), trained, losses)
    nodes = [model.graph.node[place] for place in sorted(path.nodes)]
    return [node for node in nodes if not has_gradient(node.domain, node.op_type)]


def _expand_once(
    model: onnx.ModelProto, trained: Collection[str], losses: Sequence[str], expanded: Counter[str]
) -> bool:
    """Writes out each node on the path that needs it, in place; whether there was any."""
    context = context_of(model)
    path = gradient_path(model.graph, context.types, trained, losses)
    context = replace(context, gradients=path.values)
    nodes: list[onnx.NodeProto] = []
    changed = False
    for place, node in enumerate(model.graph.node):
        replacement = _replacement(node, context) if place in path.nodes else None
        if replacement is None and place in path.nodes:
            replacement = _read_twice(node, trained, context)
        elif replacement is not None:
            expanded[node.op_type] += 1
        if replacement is not None:
            inherit(replacement, node)
            changed = True
        nodes += [node] if replacement is None else replacement
    if changed:
        replace_nodes(model.graph, nodes)
        tidy.cast_like_to_cast(model)
    return changed


def _separate_fixed_inputs(model: onnx.ModelProto, trained: Collection[str], loss: str) -> None:
    """Gives each node of `NAMES_EVERY_GRADIENT` fixed inputs that no other such node reads, in place."""
    context = context_of(model)
    path = gradient_path(model.graph, context.types, trained, [loss])
    nodes: list[onnx.NodeProto] = []
    seen: set[str] = set()
    for place, node in enumerate(model.graph.node):
        if place in path.nodes and node.op_type in NAMES_EVERY_GRADIENT:
            w = Writer(node, context)
            for i, name in enumerate(node.input):
                if name in seen:
                    node.input[i] = w("Identity", name)
                elif name and name not in path.values:
                    seen.add(name)
            nodes += w.nodes
        nodes.append(node)
    if len(nodes) > len(model.graph.node):
        replace_nodes(model.graph, nodes)


def _read_twice(node: onnx.NodeProto, trained: Collection[str], context: Context) -> list[onnx.NodeProto] | None:
    """A node that reads one parameter at two places, whose gradient ONNX Runtime would name twice."""
    twice = {name for name in node.input if name in trained and list(node.input).count(name) > 1}
    if not twice:
        return None
    w = Writer(node, context)
    copy = copy_of(node)
    copy.input[:] = [w("Identity", name) if name in twice else name for name in node.input]
    return [*w.nodes, copy]


def _replacement(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto] | None:
    """The nodes to stand for `node`, None where it may stay as it is."""
    try:
        return _written_out(node, context)
    except MISFITS:
        raise no_gradient(node, "its attributes do not fit its inputs") from None


def _written_out(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto] | None:
    if node.domain == "" and node.op_type in REPAIRS:
        repaired = REPAIRS[node.op_type](node, context)
        if repaired is not None:
            return repaired
    if has_gradient(node.domain, node.op_type) or node.domain != "":
        return None
    if node.op_type in DECOMPOSITIONS:
        return DECOMPOSITIONS[node.op_type](node, context)
    found = schema_function(node, OPSET, context.types)
    if found is None:
        return None
    function, version, defaults = found
    body = instantiate(function, node, context.fresh, defaults)
    return list(at_opset_18(body, version, context, "model"))
