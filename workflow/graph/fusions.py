"""Forms that ONNX Runtime's optimiser fuses wrongly, written in forms of equal value that it does not.

Called by `source` on the prepared model, so that training, evaluation and exported graph are all spared, and by
`inference`. The forms were found by running random graphs with all optimisations and with none. A user's own session
needs no setting then.
"""

from __future__ import annotations

import onnx

from ortflow.workflow.graph import shapes, tidy, walk
from ortflow.workflow.graph.decompose_linear import matrix_by_vector
from ortflow.workflow.graph.functions import replace_nodes
from ortflow.workflow.graph.writer import Writer, attribute, context_of, set_attribute

_REARRANGED = frozenset({"Reshape", "Transpose"})


def avoid_wrong_products(model: onnx.ModelProto) -> None:
    """Brings products of a prepared model, and what stands before them, to such forms, in place.

    MatmulTransposeFusion takes the product of a transposed matrix and a vector for one of the matrix as it lies;
    GemmTransposeFusion takes a Transpose that changes nothing for one that does.
    """
    for node in model.graph.node:
        if node.op_type == "Transpose" and node.domain == "":
            order = attribute(node, "perm", None)
            if order is not None and list(order) == sorted(order):
                node.op_type = "Identity"
                set_attribute(node, "perm", None)
    if any(node.op_type == "MatMul" for node in model.graph.node):
        context = context_of(model)
        _replace(model, {node.name: matrix_by_vector(node, context) for node in _of(model, "MatMul")})


def avoid_wrong_normalizations(model: onnx.ModelProto) -> None:
    """Writes BatchNormalization in evaluation mode as a product and a sum where it follows such a MatMul, in place.

    MatmulBNFusion makes one Gemm of the two, however many axes they have and however they are rearranged in between.
    """
    producers = walk.producers(model.graph)
    context = context_of(model)
    written: dict[str, list[onnx.NodeProto] | None] = {}
    for node in _of(model, "BatchNormalization"):
        maker = before = producers.get(node.input[0])
        while maker is not None and maker.op_type in _REARRANGED:
            maker = producers.get(maker.input[0])
        rank = shapes.rank(context.types, node.input[0])
        if maker is None or maker.op_type != "MatMul" or rank is None:
            continue
        read = list(maker.input)
        if maker is before and all(shapes.rank(context.types, name) == 2 for name in read):
            # One Gemm of these two is right.
            continue
        w = Writer(node, context)
        x, scale, bias, mean, variance = node.input
        deviation = w("Sqrt", w("Add", variance, w.constant(w.attribute("epsilon", 1e-5))))
        factor = w("Div", scale, deviation)
        shift = w("Sub", bias, w("Mul", mean, factor))
        shape = w.ints(-1, *[1] * (rank - 2))
        scaled = w("Mul", x, w("Reshape", factor, shape))
        written[node.name] = w.done(w("Add", scaled, w("Reshape", shift, shape)))
    _replace(model, written)


def _of(model: onnx.ModelProto, op_type: str) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type == op_type and node.domain == ""]


def _replace(model: onnx.ModelProto, written: dict[str, list[onnx.NodeProto] | None]) -> None:
    """Puts the nodes written for a node, by its name, in its place."""
    if not any(written.values()):
        return
    nodes = [new for node in model.graph.node for new in written.get(node.name) or [node]]
    replace_nodes(model.graph, nodes)
    tidy.constants_to_initializers(model)
    tidy.name_nodes(model)
