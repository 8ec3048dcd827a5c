"""Checks the graph of an untrusted model: each name is defined once and before use, no cycles, known operators.

Called by `read`. Sorts the nodes and repairs Split's output count; changes nothing else.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

import onnx

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.domains import CLASSICAL, MICROSOFT
from ortflow.workflow.graph.file.tensors import check_rank
from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.ir.edit import replace
from ortflow.workflow.graph.ir.order import is_sorted, topological_order
from ortflow.workflow.graph.ir.shapes import without_weights

DOMAINS = ("", "ai.onnx", CLASSICAL, MICROSOFT)
"""Domains of ONNX Runtime's operators that a trainable model may contain."""

EXPANDED_NODES = 50_000
"""Nodes that a model may have after its functions are inlined, unless several times those in the file are more."""
_EXPANSION = 4

_QUANTISED = frozenset(
    [
        "QuantizeLinear",
        "DequantizeLinear",
        "DynamicQuantizeLinear",
        "MatMulInteger",
        "ConvInteger",
        "DynamicQuantizeMatMul",
        "MatMulIntegerToFloat",
        "DynamicQuantizeLSTM",
        "QAttention",
        "QEmbedLayerNormalization",
        "QGemm",
        "QMoE",
        "MatMulNBits",
        "MatMulBnb4",
        "GatherBlockQuantized",
    ]
)
# Operators that ONNX Runtime defines in ONNX's own domain.
_RUNTIME_ONLY = frozenset({"SimplifiedLayerNormalization"})
_CONTEXT = re.compile(r"Bad node spec for node\. Name: (\S+)")
_AGAIN = "export the model again"
LONGEST_NAME = 10_000
"""Characters of a name; those of exporters, which contain the path of a module, have a few hundred."""
_SPLIT_BY_COUNT = 18
_FLOAT_MODEL = "train the float model it was made from, and quantise the exported model"


def check_structure(model: onnx.ModelProto, location: str) -> None:
    """Raises UserError, with the name, for what cannot be part of a trainable model; sorts the nodes in place."""
    _check_names(model, location)
    _check_operators(model, location)
    _check_functions(model, location)
    if not model.graph.output:
        raise UserError("the graph has no outputs", where=location, fix=_AGAIN)
    if not model.graph.node:
        raise UserError("the graph has no nodes", where=location, fix=_AGAIN)
    for graph in walk.all_graphs(model):
        for value in (*graph.input, *graph.output, *graph.value_info):
            check_rank(len(value.type.tensor_type.shape.dim), f"value {walk.quoted(value.name)}", location)
    _check_graph(model.graph, set(), location)
    for function in model.functions:
        _check_function(function, location)


def _check_names(model: onnx.ModelProto, location: str) -> None:
    """Raises UserError for a name that is too long: graphs are copied many times, and each use repeats it."""
    # One name of 10 MB took minutes.
    of_nodes = (name for node in walk.all_nodes(model) for name in (node.name, *node.input, *node.output))
    of_values = (
        value.name
        for graph in walk.all_graphs(model)
        for value in (*graph.input, *graph.output, *graph.initializer, *graph.value_info)
    )
    for name in itertools.chain(of_nodes, of_values):
        if len(name) > LONGEST_NAME:
            raise UserError(
                f"the name {name[:20]!r}… has {len(name):,} characters, more than {LONGEST_NAME:,}",
                where=location,
                fix="export the model with shorter names",
            )


def check_valid(model: onnx.ModelProto, location: str) -> None:
    """Raises UserError for violations that onnx's checker finds, such as unknown attributes of an operator."""
    light = without_weights(model)
    for node in walk.all_nodes(light):
        if node.op_type in _RUNTIME_ONLY and node.domain == "":
            node.domain = MICROSOFT
    light.opset_import.append(onnx.helper.make_opsetid(MICROSOFT, 1))
    del light.graph.value_info[:]
    for graph in walk.all_graphs(light):
        for value in (*graph.input, *graph.output):
            # Exporters omit unknown shapes, which the checker requires.
            if value.type.HasField("tensor_type"):
                value.type.tensor_type.shape.SetInParent()
    try:
        onnx.checker.check_model(light)
    except (onnx.checker.ValidationError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).partition("\n")[0].split())
        culprit = _CONTEXT.search(str(error))
        subject = f"node {walk.quoted(culprit[1])} is not valid" if culprit else "the model is not valid"
        raise UserError(f"{subject}: {reason[:300]}", where=location, fix=_AGAIN) from None


def _check_operators(model: onnx.ModelProto, location: str) -> None:
    local = {(f.domain, f.name) for f in model.functions}
    opset = max((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), default=0)
    for graph in walk.all_graphs(model):
        if graph.sparse_initializer:
            name = graph.sparse_initializer[0].values.name
            raise UserError(
                f"initializer {walk.quoted(name)} is sparse", where=location, fix="save the model with dense weights"
            )
    # Most nodes have no attributes, and a generator for each of 50,000 takes longer than the question.
    for node in walk.nodes(model.graph.node):
        if node.attribute and any(a.ref_attr_name for a in node.attribute):
            raise UserError(
                f"{walk.called(node)} uses a function attribute outside a function", where=location, fix=_AGAIN
            )
    for node in walk.all_nodes(model):
        if node.attribute and any(a.HasField("sparse_tensor") or a.sparse_tensors for a in node.attribute):
            raise UserError(f"{walk.called(node)} is sparse", where=location, fix="save the model with dense weights")
        if (node.domain, node.op_type) in local:
            continue
        if node.op_type in _QUANTISED or node.op_type.startswith("QLinear"):
            raise UserError(f"the model is quantised: {walk.called(node)}", where=location, fix=_FLOAT_MODEL)
        if node.op_type == "Split":
            _check_split(node, opset, location)
        if node.domain not in DOMAINS:
            raise UserError(
                f"{walk.called(node)} is a custom operator, which ONNX Runtime does not have",
                where=location,
                fix="export the model with ONNX's operators only",
            )


def _check_split(node: onnx.NodeProto, opset: int, location: str) -> None:
    """Check that Split has as many outputs as it declares; removes the declaration in place if the opset lacks it."""
    for place, attribute in enumerate(node.attribute):
        if attribute.name == "num_outputs":
            if attribute.i != len(node.output):
                # Shape inference in onnx would allocate memory for the declared number.
                raise UserError(f"{walk.called(node)} has a wrong number of outputs", where=location, fix=_AGAIN)
            if opset < _SPLIT_BY_COUNT:
                # PyTorch's dynamo exporter leaves it when it converts its opset 18 to 17.
                del node.attribute[place]
            return


def _check_functions(model: onnx.ModelProto, location: str) -> None:
    """Check that functions are not recursive, and that inlining them all stays within EXPANDED_NODES."""
    if not model.functions:
        return
    by_key = {(f.domain, f.name): f for f in model.functions}
    if len(by_key) < len(model.functions):
        raise UserError("two of its functions have the same name", where=location, fix=_AGAIN)
    sizes: dict[tuple[str, str], int] = {}

    def size(top: Iterable[onnx.NodeProto], calling: tuple[tuple[str, str], ...]) -> int:
        total = 0
        for node in walk.nodes(top):
            key = (node.domain, node.op_type)
            if key in by_key and key not in sizes:
                if key in calling:
                    raise UserError(f"function {walk.quoted(node.op_type)} calls itself", where=location)
                if len(calling) > 100:
                    raise UserError("its functions call each other more than 100 deep", where=location)
                sizes[key] = size(by_key[key].node, (*calling, key))
            total += sizes.get(key, 1)
        return total

    for key, function in by_key.items():
        if key not in sizes:
            sizes[key] = size(function.node, (key,))
    most = max(EXPANDED_NODES, _EXPANSION * sum(1 for _ in walk.all_nodes(model)))
    if size(model.graph.node, ()) > most:
        raise UserError(f"its functions expand to more than {most} nodes", where=location)


def _check_graph(graph: onnx.GraphProto, outer: set[str], location: str) -> None:
    owners: dict[str, str | onnx.NodeProto] = {}

    def define(name: str, owner: str | onnx.NodeProto) -> None:
        if name in owners or name in outer:
            first, second = (
                other_owner if isinstance(other_owner, str) else walk.called(other_owner)
                for other_owner in (owners.get(name, "a graph around it"), owner)
            )
            raise UserError(
                f"the name {walk.quoted(name)} is given twice, to {first} and to {second}", where=location, fix=_AGAIN
            )
        owners[name] = owner

    for value in graph.input:
        define(value.name, "an input")
    inputs = set(owners)
    initializers: set[str] = set()
    for tensor in graph.initializer:
        if not tensor.name:
            raise UserError("an initializer has no name", where=location, fix=_AGAIN)
        # IR version 3 also lists initializers as inputs.
        if tensor.name in initializers or tensor.name not in inputs:
            define(tensor.name, "an initializer")
        initializers.add(tensor.name)
    for node in graph.node:
        for name in node.output:
            if name in owners or name in outer:
                define(name, node)
            elif name:
                owners[name] = node
    names = set(owners) | outer
    for node in graph.node:
        if not names.issuperset(read := walk.inputs(node)):
            missing = min(read - names)
            raise UserError(f"{walk.called(node)} reads {walk.quoted(missing)}, which no node produces", where=location)
    for value in graph.output:
        if value.name not in names:
            raise UserError(f"output {walk.quoted(value.name)} is produced by no node", where=location, fix=_AGAIN)
    _sort(graph, location)
    for node in graph.node:
        for subgraph in walk.subgraphs(node):
            _check_graph(subgraph, names, location)


def _check_function(function: onnx.FunctionProto, location: str) -> None:
    names = set(function.input)
    for node in function.node:
        missing = sorted(walk.inputs(node) - names)
        if missing:
            raise UserError(
                f"in function {walk.quoted(function.name)}, {walk.called(node)} reads"
                f" {walk.quoted(missing[0])}, which no node before it produces",
                where=location,
            )
        names.update(name for name in node.output if name)
    for name in function.output:
        if name not in names:
            raise UserError(
                f"function {walk.quoted(function.name)} does not produce its output {walk.quoted(name)}", where=location
            )


def _sort(graph: onnx.GraphProto, location: str) -> None:
    """Sort the nodes topologically; keeps the file's order if it is topological."""
    if is_sorted(graph.node):
        return
    order = topological_order(graph.node, lambda place, nth: nth)
    if len(order) < len(graph.node):
        stuck = graph.node[min(set(range(len(graph.node))).difference(order))]
        raise UserError(f"the graph has a cycle through {walk.called(stuck)}", where=location, fix=_AGAIN)
    replace(graph.node, [graph.node[place] for place in order])
