"""Iterates over a model: every graph, node and tensor, including those in subgraphs and functions.

Reads only; callers may change the messages they get.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

import onnx

from ortflow.workflow.graph.ir.origin import origin

_PLAIN = re.compile(r"[\w.]{1,160}")


def subgraphs(node: onnx.NodeProto) -> Iterable[onnx.GraphProto]:
    """The graphs in a node's attributes (If, Loop, Scan)."""
    # Most nodes have no attributes, and a large model is walked dozens of times.
    return _graphs_of_attributes(node) if node.attribute else ()


def _graphs_of_attributes(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def nodes(top: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Each node of `top` and of its subgraphs."""
    for node in top:
        yield node
        if node.attribute:
            for graph in _graphs_of_attributes(node):
                yield from nodes(graph.node)


def all_nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Each node of the model: main graph, subgraphs, functions."""
    yield from nodes(model.graph.node)
    for function in model.functions:
        yield from nodes(function.node)


def all_graphs(model: onnx.ModelProto) -> Iterator[onnx.GraphProto]:
    """The main graph and each subgraph, including those in functions."""
    yield model.graph
    for top in (model.graph.node, *(function.node for function in model.functions)):
        yield from _graphs_below(top)


def _graphs_below(top: Iterable[onnx.NodeProto]) -> Iterator[onnx.GraphProto]:
    for node in top:
        if node.attribute:
            below = list(subgraphs(node))
            yield from below
            for graph in below:
                yield from _graphs_below(graph.node)


def all_tensors(model: onnx.ModelProto) -> Iterator[tuple[str, onnx.TensorProto]]:
    """Each tensor of the model with a description: initializers, then attributes of nodes."""
    for graph in all_graphs(model):
        for tensor in graph.initializer:
            yield f"initializer {quoted(tensor.name)}", tensor
    for node in all_nodes(model):
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield f"attribute {quoted(attribute.name)} of {called(node)}", attribute.t
            for tensor in attribute.tensors:
                yield f"attribute {quoted(attribute.name)} of {called(node)}", tensor


def called(node: onnx.NodeProto) -> str:
    """How messages name a node: by its name and operator, or by its output, and by its position in PyTorch."""
    domain = f"{node.domain}." if node.domain not in ("", "ai.onnx") else ""
    operator = _word(domain + node.op_type)
    place = origin(node)
    if node.name:
        return f"node {quoted(node.name)} ({operator}{'; ' if place else ''}{place})"
    output = next((name for name in node.output if name), "")
    return f"the {operator} node that makes {quoted(output)}{f' ({place})' if place else ''}"


def quoted(name: str) -> str:
    """A name from the file in quotes: on one line and of limited length."""
    return repr(name if len(name) <= 160 else name[:157] + "...")


def _word(text: str) -> str:
    return text if _PLAIN.fullmatch(text) else quoted(text)


def captured(graph: onnx.GraphProto) -> set[str]:
    """Names that a subgraph reads from the graphs around it."""
    inner_names = {tensor.name for tensor in graph.initializer} | {value.name for value in graph.input}
    read: set[str] = {value.name for value in graph.output}
    for node in graph.node:
        read |= inputs(node)
        inner_names.update(node.output)
    return read - inner_names


def inputs(node: onnx.NodeProto) -> set[str]:
    """Names that a node reads, including those captured by its subgraphs."""
    read = set(node.input)
    read.discard("")
    if node.attribute:
        for graph in _graphs_of_attributes(node):
            read |= captured(graph)
    return read


def consumers(graph: onnx.GraphProto) -> dict[str, list[tuple[onnx.NodeProto, int]]]:
    """Value name -> the nodes that read it, each with the input's position (-1: read by a subgraph)."""
    return _read_by(graph.node, subgraphs)


def readers(graph: onnx.GraphProto) -> dict[str, list[tuple[onnx.NodeProto, int]]]:
    """As `consumers`, with the nodes in the branches of an If, which read values under the same names, in its place."""
    return _read_by(with_branches(graph.node), lambda node: () if is_if(node) else subgraphs(node))


def _read_by(
    nodes: Iterable[onnx.NodeProto], closed: Callable[[onnx.NodeProto], Iterable[onnx.GraphProto]]
) -> dict[str, list[tuple[onnx.NodeProto, int]]]:
    """Of `nodes`, those that read each value; `closed` are a node's subgraphs whose own nodes are not among them."""
    readers: dict[str, list[tuple[onnx.NodeProto, int]]] = {}
    for node in nodes:
        for place, name in enumerate(node.input):
            if name in readers:
                readers[name].append((node, place))
            elif name:
                readers[name] = [(node, place)]
        for subgraph in closed(node) if node.attribute else ():
            for name in captured(subgraph):
                readers.setdefault(name, []).append((node, -1))
    return readers


def with_branches(top: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Each node of `top`, and of the branches of each If."""
    for node in top:
        yield node
        if node.attribute and is_if(node):
            for graph in _graphs_of_attributes(node):
                yield from with_branches(graph.node)


def is_if(node: onnx.NodeProto) -> bool:
    """Whether this is an If of ONNX."""
    return bool(node.op_type == "If" and node.domain == "")


def producers(graph: onnx.GraphProto) -> dict[str, onnx.NodeProto]:
    """Value name -> the node that produces it."""
    return {name: node for node in graph.node for name in node.output if name}
