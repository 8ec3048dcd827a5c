"""Recomputes parts of the forward pass during the backward pass, so that their values need not be kept.

Called by `assembly` on the differentiated graph. A part is all nodes of one scope, usually a module, that a pattern of
`model.recompute` matches, or of one layer that `layer_marks` has marked. Values that a part reads from outside are
kept; its other values exist twice, each time for a short while (Chen et al. 2016). The same nodes with the same inputs
give the same bits. What has an effect is not repeated: sums over ranks are kept, and so are the masks of dropout.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import onnx
from onnx import TensorProto

from ortflow.workflow.graph.autodiff.reverse import LOSS_GRADIENT
from ortflow.workflow.graph.ir import shared_entropy, walk
from ortflow.workflow.graph.ir.collective import Kind, is_collective, kind_of
from ortflow.workflow.graph.ir.edit import Editor, attributes_of, constants_of, described
from ortflow.workflow.graph.ir.order import needed_by, prune, sort_nodes
from ortflow.workflow.graph.ir.origin import scopes_of
from ortflow.workflow.graph.optimize.layer_marks import WHERE, layer_of
from ortflow.workflow.graph.patterns import matches

_DRAWS = frozenset(
    {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)
"""Operators that would draw other numbers the second time; their outputs are kept."""
_NOT_REAL = frozenset(
    {"ArgMax", "ArgMin", "Equal", "Greater", "GreaterOrEqual", "IsInf", "IsNaN", "Less", "LessOrEqual", "NonZero",
     "Shape", "Size"}
)  # fmt: skip
"""Operators whose results are sizes, places or conditions, and no gradients."""
_OURS = "ortflow."
"""Prefix of names that no node of a user's model has."""


def recompute(
    graph: onnx.GraphProto, patterns: Sequence[str], roots: Collection[str] = (LOSS_GRADIENT,), *, partial: bool = False
) -> list[str]:
    """Recompute marked layers, or the scopes that a pattern matches, for the backward pass, in place; log lines.

    A scope is a module's path in PyTorch, `layers.0`, or the beginning of a node's name. `roots` are the gradients that
    the backward pass begins with. Raises UserError if a pattern matches none, unless the graph is a part of a model.
    """
    marked = any(layer_of(node) is not None for node in graph.node)
    if not patterns and not marked:
        return []
    # The nodes that the loss and the running statistics depend on.
    forward = needed_by(graph.node, (value.name for value in graph.output if not value.name.endswith("_grad")))
    first = [node for place, node in enumerate(graph.node) if place in forward]
    later = [node for place, node in enumerate(graph.node) if place not in forward]
    parts = _layers(first) if marked else _parts(first, patterns, partial=partial)
    edit, weight_values = Editor(graph), _of_weights(graph, first)
    repeated = sum(_repeat(edit, part, first, later, roots, weight_values) for part in parts.values())
    sort_nodes(graph)
    prune(graph)
    noun = "layers" if marked else f"parts ({', '.join(patterns)})"
    return [f"{repeated} nodes of {len(parts)} {noun} recomputed for the backward pass"]


def _layers(nodes: Sequence[onnx.NodeProto]) -> dict[str, list[onnx.NodeProto]]:
    """A layer's mark -> its nodes, including those without a mark that passes have put between them."""
    marks: list[str | None] = [layer_of(node) for node in nodes]
    makers = {name: place for place, node in enumerate(nodes) for name in node.output if name}
    readers: dict[int, list[int]] = {}
    follows: list[set[str]] = []
    """The layers that a node follows with nothing but unmarked nodes between."""
    for place, node in enumerate(nodes):
        layers = set[str]()
        for name in walk.inputs(node) & makers.keys():
            readers.setdefault(makers[name], []).append(place)
            mark = marks[makers[name]]
            layers |= follows[makers[name]] if mark is None else {mark}
        follows.append(layers)
    for place in reversed(range(len(nodes))):
        behind = {marks[reader] for reader in readers.get(place, ())}
        if marks[place] is None and len(behind) == 1:
            (mark,) = behind
            marks[place] = mark if mark in follows[place] else None
    parts: dict[str, list[onnx.NodeProto]] = {}
    for mark, node in zip(marks, nodes, strict=True):
        if mark is not None:
            parts.setdefault(mark, []).append(node)
    return parts


def _parts(
    nodes: Sequence[onnx.NodeProto], patterns: Sequence[str], *, partial: bool
) -> dict[str, list[onnx.NodeProto]]:
    """The outermost scope that a pattern matches -> its nodes."""
    scopes = [scopes_of(node) for node in nodes]
    all_scopes = list(dict.fromkeys(scope for node_scopes in scopes for scope in node_scopes))
    for place, pattern in enumerate([] if partial else patterns):
        matches(pattern, all_scopes, f"{WHERE}[{place}]", "module or node of the model")
    parts: dict[str, list[onnx.NodeProto]] = {}
    for node, node_scopes in zip(nodes, scopes, strict=True):
        outermost = next((scope for scope in node_scopes if _matched(scope, patterns)), None)
        if outermost is not None:
            parts.setdefault(outermost, []).append(node)
    return parts


def _matched(scope: str, patterns: Collection[str]) -> bool:
    return any(fnmatch.fnmatchcase(scope, pattern) for pattern in patterns)


def _repeat(
    edit: Editor,
    part: Sequence[onnx.NodeProto],
    first: Sequence[onnx.NodeProto],
    later: Sequence[onnx.NodeProto],
    roots: Collection[str],
    of_weights: Collection[str],
) -> int:
    """Let the nodes `later` read copies of a part's nodes; returns the number of copies.

    Values `of_weights` do not depend on the batch, so that their readers need not wait for the gradient.
    Values that nodes of the model outside the part read in the forward pass (`first`) are kept. Our own nodes, which
    update statistics or compute the loss, need them only briefly.
    """
    part_ids = {id(node) for node in part}
    other_nodes = (node for node in first if id(node) not in part_ids and not node.name.startswith(_OURS))
    read_elsewhere = {name for node in other_nodes for name in walk.inputs(node)}
    constants = constants_of(edit.graph)
    copyable = [node for node in part if _is_copyable(node, constants)]
    masks = {node.output[1] for node in part if node.op_type == "Dropout" and len(node.output) > 1}
    makers = {name: node for node in copyable for name in node.output if name and name not in read_elsewhere | masks}
    readers = [node for node in later if any(name in makers for name in node.input)]
    gradient = _gradient_before(makers, later, roots)
    if gradient is None:
        return 0
    needed_values: set[str] = set()
    waiting = [name for node in readers for name in node.input if name in makers]
    while waiting:
        name = waiting.pop()
        if name not in needed_values:
            needed_values.add(name)
            waiting += [read for read in makers[name].input if read in makers]
    copied = [node for node in copyable if needed_values.intersection(node.output)]
    renamed = {name: edit.fresh(f"{name}.again") for node in copied for name in node.output if name}
    gate = _gate(edit, gradient)
    outside = [name for node in copied for name in node.input if name and name not in makers]
    descriptions = described(edit.graph)
    for name in dict.fromkeys(outside):
        real = name in descriptions and descriptions[name].type.tensor_type.elem_type == TensorProto.FLOAT
        if real and name not in of_weights:
            # Either way it is the value: what counts is that its readers wait for the gate.
            renamed[name] = edit("Where", gate, name, name, output=edit.fresh(f"{name}.again"))
    for node in copied:
        inputs = [renamed.get(name, name) for name in node.input]
        outputs = [renamed.get(name, "") for name in node.output]
        if node.op_type == "Dropout":
            mask = node.output[1]
            # The mask itself, but not before the gradient. Where has no kernel for masks.
            mask = edit("Or", mask, edit("And", mask, gate))
            _drop_again(edit, inputs[0], mask, constants[node.input[1]], outputs[0])
            continue
        edit.write(node.op_type, inputs, outputs, node.domain, **attributes_of(node))
    for name in renamed:
        if name not in descriptions:
            continue
        copy = onnx.ValueInfoProto.FromString(descriptions[name].SerializeToString())
        copy.name = renamed[name]
        edit.graph.value_info.append(copy)
    for node in readers:
        node.input[:] = [renamed[name] if name in makers else name for name in node.input]
    return len(copied)


def _of_weights(graph: onnx.GraphProto, nodes: Sequence[onnx.NodeProto]) -> set[str]:
    """Weights, which have fixed shapes, and what the nodes compute from weights and constants alone."""
    values = {value.name for value in graph.input if not _varies(value)}
    constants = {tensor.name for tensor in graph.initializer}
    for node in nodes:
        read = walk.inputs(node)
        if node.op_type not in _DRAWS and read and read <= values | constants:
            values.update(name for name in node.output if name)
    return values


def _varies(value: onnx.ValueInfoProto) -> bool:
    """Whether the value is a part of the batch: the length of an axis is not known."""
    return not all(dim.HasField("dim_value") for dim in value.type.tensor_type.shape.dim)


def _is_copyable(node: onnx.NodeProto, constants: Mapping[str, np.ndarray]) -> bool:
    """Whether a node may run twice: not if it draws numbers, sums over ranks or has subgraphs."""
    if node.op_type == "Dropout" and not node.domain:
        # Another run draws another mask, but the mask of the first one gives the same values.
        inputs = [*node.input, "", ""]
        on = inputs[2] in constants and bool(constants[inputs[2]])
        return on and inputs[1] in constants and len(node.output) > 1 and bool(node.output[1])
    if is_collective(node):
        return kind_of(node) == Kind.COPY
    return node.op_type not in (*_DRAWS, shared_entropy.OPERATOR) and not list(walk.subgraphs(node))


def _drop_again(edit: Editor, value: str, mask: str, ratio: np.ndarray, output: str) -> None:
    """What Dropout makes of a value with a known mask; the same bits as from ONNX Runtime's CPU kernel."""
    # The division comes first: behind the mask, ONNX Runtime would move it into a product that follows.
    scaled = edit("Div", value, edit.constant(np.float32(1) - np.float32(ratio)))
    edit("Mul", scaled, edit.cast(mask), output=output)


def _gradient_before(values: Collection[str], later: Sequence[onnx.NodeProto], roots: Collection[str]) -> str | None:
    """The first gradient that is combined with values computed from `values`, and is not computed from them itself."""
    gradients, touched = set(roots), set(values)
    for node in later:
        # A subgraph's values come last, in a fixed order.
        read = [*node.input, *sorted(walk.inputs(node).difference(node.input))]
        if touched.intersection(read):
            candidates = [str(name) for name in read if name in gradients and name not in touched]
            if candidates:
                return candidates[0]
            touched.update(node.output)
        if node.op_type not in _NOT_REAL and gradients.intersection(read):
            gradients.update(node.output)
    return None


def _gate(edit: Editor, gradient: str) -> str:
    """A Boolean that is available when the gradient is."""
    # ONNX Runtime runs nodes as early as it can and merges equal nodes, so a copy must read something that the first
    # pass does not have.
    flat = edit("Reshape", gradient, edit.ints(-1))
    return edit("IsNaN", edit("Slice", flat, edit.ints(0), edit.ints(1)))
