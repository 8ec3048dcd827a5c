"""Copies of a number, such as of the step (`adam.own_steps`): each kernel that counts in place has its own. Pure."""

from __future__ import annotations

from collections.abc import Collection

import onnx

from ortflow.workflow.graph.domains import CUDA_DOMAIN
from ortflow.workflow.graph.ir.edit import constants_of, described, dims_of
from ortflow.workflow.graph.ir.order import prune


def copies_of(graph: onnx.GraphProto, numbers: Collection[str]) -> dict[str, str]:
    """Each single part of one of `numbers` that is repeated and split -> the number; none if a kernel changes parts."""
    nodes, constants = graph.node, constants_of(graph)
    tiles = {node.output[0]: node for node in nodes if node.op_type == "Tile" and node.input[0] in numbers}
    parts = {}
    for node in nodes:
        if node.op_type == "Split" and node.input[0] in tiles and not node.input[1:]:
            number, repeats = tiles[node.input[0]].input
            if repeats in constants and constants[repeats].tolist() == [len(node.output)]:
                parts.update(dict.fromkeys(node.output, number))
    changed = {name for node in nodes if node.domain and node.domain != CUDA_DOMAIN for name in node.input}
    return {} if changed.intersection(parts) else parts


def without_copies(graph: onnx.GraphProto) -> None:
    """Let readers of copies read the number, in place: a Split of many is not captured as a CUDA graph."""
    numbers = {name for name, value in described(graph).items() if dims_of(value) == (1,)}
    copies = copies_of(graph, numbers)
    for node in graph.node if copies else ():
        for place, name in enumerate(node.input):
            node.input[place] = copies.get(name, name)
    if copies:
        prune(graph)
