"""Replaces forms that ONNX Runtime computes wrongly or not at all by equivalent forms that it computes correctly.

Called by `source` on the prepared model, which fixes training, evaluation and exported graphs, and by `inference`. Most
of the errors are made by ONNX Runtime's optimiser; they were found by comparing runs with and without optimisations.
The user's own sessions need no special settings.
"""

from __future__ import annotations

import numpy as np
import onnx

from ortflow.workflow.graph.decompose.images import dilated_pads
from ortflow.workflow.graph.decompose.linear import matrix_by_vector
from ortflow.workflow.graph.ir import shapes, walk
from ortflow.workflow.graph.ir.edit import described, replace
from ortflow.workflow.graph.ir.functions import fresh_names
from ortflow.workflow.graph.ir.replacement import Context, Replacement, context_of, copy_of
from ortflow.workflow.graph.normalize import tidy
from ortflow.workflow.graph.normalize.sigmoids import exact_logarithms

_REARRANGED = frozenset({"Reshape", "Transpose"})
_POOLINGS = frozenset({"AveragePool", "MaxPool"})
_PASSED = frozenset({"Dropout", "Identity"})
"""Moved out of the node before ONNX Runtime reads the pads."""


def avoid_wrong_forms(model: onnx.ModelProto) -> None:
    """Replace such nodes of a prepared model, in place. Raises UserError if that needs an unknown size.

    MatmulTransposeFusion computes the product of a transposed matrix and a vector as if the matrix were not transposed.
    No kernel supports auto_pad SAME together with dilations. The logarithm of a small Sigmoid is wrong.
    """
    if not any(node.op_type in ("Conv", "Log", "MatMul", "MaxPool", "Pad") for node in model.graph.node):
        return
    context = context_of(model)
    replacements = {node.name: matrix_by_vector(node, context) for node in _of(model, "MatMul")}
    replacements |= {node.name: dilated_pads(node, context) for node in (*_of(model, "Conv"), *_of(model, "MaxPool"))}
    replacements |= _pads_before_pooling(model, context)
    replacements |= exact_logarithms(model.graph, context)
    _replace(model, replacements)


def _pads_before_pooling(model: onnx.ModelProto, context: Context) -> dict[str, list[onnx.NodeProto] | None]:
    """Replace zero padding before a pooling by padding with negative zeros.

    Pad_Fusion merges the padding into the pooling, which treats it as -infinity for a maximum and excludes it from an
    average. It only fuses a constant whose bits are all 0.
    """
    readers = walk.consumers(model.graph)

    def pooled(value: str) -> bool:
        return any(
            node.op_type in _POOLINGS or (node.op_type in _PASSED and pooled(node.output[0]))
            for node, _ in readers.get(value, [])
        )

    replacements: dict[str, list[onnx.NodeProto] | None] = {}
    for node in _of(model, "Pad"):
        w = Replacement(node, context)
        value = w.value(2) if w.input(2) else np.zeros((), np.float32)
        if (
            w.attribute("mode", "constant") != "constant"
            or value is None
            or value.dtype != np.float32
            or value.any()
            or not pooled(node.output[0])
        ):
            continue
        copy = copy_of(node)
        copy.input.extend([""] * (3 - len(copy.input)))
        copy.input[2] = w.constant(-0.0)
        replacements[node.name] = [*w.nodes, copy]
    return replacements


def avoid_wrong_normalizations(model: onnx.ModelProto) -> None:
    """Replace BatchNormalization in evaluation mode after such a MatMul by a product and a sum, in place.

    MatmulBNFusion merges the two into one Gemm, whatever their rank and the reshapes between them.
    """
    producers = walk.producers(model.graph)
    # Types were found when the model was prepared; an inference graph does not contain its weights.
    types = {name: value.type for name, value in described(model.graph).items()}
    context = Context(fresh_names(model.graph), types)
    replacements: dict[str, list[onnx.NodeProto] | None] = {}
    for node in _of(model, "BatchNormalization"):
        maker = before = producers.get(node.input[0])
        while maker is not None and maker.op_type in _REARRANGED:
            maker = producers.get(maker.input[0])
        rank = shapes.rank(context.types, node.input[0])
        if maker is None or maker.op_type != "MatMul" or rank is None:
            continue
        if maker is before and rank == 2:
            # The Gemm of these two is correct.
            continue
        w = Replacement(node, context)
        x, scale, bias, mean, variance = node.input
        deviation = w("Sqrt", w("Add", variance, w.constant(w.attribute("epsilon", 1e-5))))
        shape = w.ints(-1, *[1] * (rank - 2))
        mean, factor, bias = (w("Reshape", value, shape) for value in (mean, w("Div", scale, deviation), bias))
        replacements[node.name] = w.done(w("Add", w("Mul", w("Sub", x, mean), factor), bias))
    _replace(model, replacements)


def _of(model: onnx.ModelProto, op_type: str) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type == op_type and node.domain == ""]


def _replace(model: onnx.ModelProto, replacements: dict[str, list[onnx.NodeProto] | None]) -> None:
    """Replace nodes, by name, with the nodes written for them."""
    if not any(replacements.values()):
        return
    nodes = [new for node in model.graph.node for new in replacements.get(node.name) or [node]]
    replace(model.graph.node, nodes)
    tidy.constants_to_initializers(model)
    tidy.name_nodes(model)
