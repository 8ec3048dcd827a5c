"""Finds the values of a graph that become indices, such as the sampling positions of GridSample. Pure.

They stay in fp32 when the graph is converted to half precision: bf16 has 8 significant bits, so that a position in an
image of 256 pixels would be off by up to one pixel, and an index by any number. PyTorch's autocast rounds them (2.11:
`affine_grid` is a product in half precision), and its gradients of a spatial transformer are off twice as much.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx
from onnx import TensorProto

INDICES = (TensorProto.INT32, TensorProto.INT64)
ARITHMETIC = {
    *("Abs", "Add", "Ceil", "Clip", "Div", "Floor", "Max", "Min", "Mod", "Mul", "Neg", "Round", "Sub", "Where"),
    "ReduceSum",
}
"""Operators that keep a position a position; PyTorch exports the product of `affine_grid` as Mul and ReduceSum. An
activation ends the search: before it are features."""


def positions(nodes: Iterable[onnx.NodeProto], types: Mapping[str, int], passed: Iterable[str]) -> set[str]:
    """The fp32 values that a Cast to integers reads, and those from which arithmetic and products compute them.

    Parameters
    ----------
    nodes
        Of the graph, in any order.
    types
        Element type of each value.
    passed
        Further operators through which the search goes on: products, and what moves numbers.
    """
    followed = ARITHMETIC.union(passed)
    nodes = list(nodes)
    makers = {name: node for node in nodes for name in node.output if name}
    queue = [node.input[0] for node in nodes if node.op_type == "Cast" and types.get(node.output[0]) in INDICES]
    reached: set[str] = set()
    while queue:
        name = queue.pop()
        maker = makers.get(name)
        if types.get(name) == TensorProto.FLOAT and name not in reached and maker and maker.op_type in followed:
            reached.add(name)
            queue.extend(maker.input)
    return reached
