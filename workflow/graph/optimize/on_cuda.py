"""Adapts the training graph to GPUs: sums in a fixed order, and no copies that only help the CPU.

Called by step `configure` for GPU runs, on the finished graph. Results stay the same up to rounding.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping

import numpy as np
import onnx
from onnx import TensorProto

from ortflow.workflow.graph.ir import shapes
from ortflow.workflow.graph.ir.edit import attributes_of, constants_of, replace
from ortflow.workflow.graph.ir.order import drop_unread_inputs, prune, sort_nodes
from ortflow.workflow.graph.ir.origin import inherit
from ortflow.workflow.graph.ir.replacement import Context, Replacement, attribute, context_of
from ortflow.workflow.graph.memory.element_types import element_types
from ortflow.workflow.graph.normalize import tidy
from ortflow.workflow.graph.optimize.constants import fold_constants
from ortflow.workflow.graph.optimize.counts import counts_on_device
from ortflow.workflow.graph.optimize.even_pads import pad_evenly, pads_unevenly
from ortflow.workflow.graph.optimize.sizes import sizes_by_shapes

BITS = 38
"""Bits of the largest addend as an integer: more than fp32 has, with room for 2^24 addends in an int64."""
JOINED = 32
"""Number of inputs that the CUDA provider's Concat supports while a CUDA graph is captured."""
FLOATS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16})
SMALLEST = 2.0**-80
"""Smaller addends are treated as 0: 2^(BITS + 80) is still representable in fp32."""


def on_cuda(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy for the CUDA provider."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    _plain_transposes(copy.graph)
    context = context_of(copy)
    makers = {name: node for node in copy.graph.node for name in node.output}
    nodes: list[onnx.NodeProto] = []
    again = False
    constants, types = constants_of(copy.graph), element_types(copy)
    for node in copy.graph.node:
        rewrite = _rewrite_of(node, makers, constants, context, types)
        if rewrite is None:
            nodes.append(node)
            continue
        writer = Replacement(node, context)
        rewrite(writer)
        inherit(writer.nodes, node)
        nodes += writer.nodes
        again = again or rewrite in REDESCRIBED
    replace(copy.graph.node, nodes)
    tidy.constants_to_initializers(copy)
    prune(copy.graph)
    drop_unread_inputs(copy.graph)
    if again:
        shapes.infer(copy, list(copy.graph.value_info))
        types = element_types(copy)
    counts_on_device(copy, types)
    sizes_by_shapes(copy.graph)
    fold_constants(copy)
    return copy


def _rewrite_of(
    node: onnx.NodeProto,
    makers: Mapping[str, onnx.NodeProto],
    constants: Mapping[str, np.ndarray],
    context: Context,
    types: Mapping[str, int],
) -> Callable[[Replacement], None] | None:
    """The function that writes the nodes that replace a node; None if it stays."""
    if _sums_rows(node, constants, context, types):
        return rows_by_product
    if _races(node, context):
        return functools.partial(add_integers, onto_zeros=_is_zeros(makers.get(node.input[0])))
    if _normalizes_batch(node, context):
        return normalize_batch
    if pads_unevenly(node):
        return pad_evenly
    if _splits_unevenly(node, constants, types):
        return slice_apart
    if _looks_up_rows(node, context):
        return gather
    return join_in_parts if not node.domain and node.op_type == "Concat" and len(node.input) > JOINED else None


def _races(node: onnx.NodeProto, context: Context) -> bool:
    """Whether the CUDA kernel adds fp32 numbers to one element in the order in which its threads arrive."""
    if node.domain or node.op_type != "ScatterElements" or attribute(node, "reduction", "none") not in ("add", b"add"):
        return False
    if shapes.element_type(context.types, node.input[0]) != TensorProto.FLOAT:
        return False
    places = shapes.shape(context.types, node.input[1])
    # With one position along the axis, no two numbers are added.
    return places is None or places[attribute(node, "axis", 0)] != 1


def _sums_rows(
    node: onnx.NodeProto, constants: Mapping[str, np.ndarray], context: Context, types: Mapping[str, int]
) -> bool:
    """Whether a node sums fp32 values over their last axis and keeps that axis."""
    if node.domain or node.op_type != "ReduceSum" or len(node.input) < 2 or not attribute(node, "keepdims", 1):
        return False
    axes, rank = constants.get(node.input[1]), shapes.rank(context.types, node.input[0])
    if axes is None or axes.tolist() not in ([-1], [rank - 1] if rank else []) or rank == 1:
        return False
    return bool(types.get(node.input[0]) == TensorProto.FLOAT)


def _normalizes_batch(node: onnx.NodeProto, context: Context) -> bool:
    """Whether the node is a BatchNormalization in training mode."""
    # The CUDA provider supports it only up to opset 13.
    return bool(
        not node.domain
        and node.op_type == "BatchNormalization"
        and attribute(node, "training_mode", 0)
        and shapes.rank(context.types, node.input[0])
    )


def normalize_batch(w: Replacement) -> None:
    """BatchNormalization in training mode: normalises by batch statistics, and updates the running ones."""
    x, scale, bias, mean, variance = w.node.input
    rank, momentum = w.rank(0), w.attribute("momentum", 0.9)
    axes, along = w.ints(0, *range(2, rank)), w.ints(1, -1, *[1] * (rank - 2))
    average = w("ReduceMean", x, axes, keepdims=1)
    # Two passes: mean(x^2) - mean(x)^2 cancels where the mean is much larger than the deviation.
    centred = w("Sub", x, average)
    spread = w("ReduceMean", w("Mul", centred, centred), axes, keepdims=1)
    inverse = w("Reciprocal", w("Sqrt", w("Add", spread, w.constant(w.attribute("epsilon", 1e-5)))))
    scaled = w("Mul", inverse, w("Reshape", scale, along))
    normalised = w("Add", w("Mul", centred, scaled), w("Reshape", bias, along))
    running = []
    for place, (old, new) in enumerate(((mean, average), (variance, spread)), 1):
        if len(w.node.output) <= place or not w.node.output[place]:
            running.append("")
            continue
        flat = w("Reshape", new, w.ints(-1))
        old_part = w("Mul", old, w.constant(momentum))
        running.append(w("Add", old_part, w("Mul", flat, w.constant(1 - momentum))) if momentum else flat)
    w.done(normalised, *running)


def join_in_parts(w: Replacement) -> None:
    """Split a Concat of more inputs than a captured one supports."""
    axis, values = w.attribute("axis", 0), list(w.node.input)
    while len(values) > JOINED:
        parts = [values[start : start + JOINED] for start in range(0, len(values), JOINED)]
        values = [w("Concat", *part, axis=axis) if len(part) > 1 else part[0] for part in parts]
    w.done(w("Concat", *values, axis=axis))


def _splits_unevenly(node: onnx.NodeProto, constants: Mapping[str, np.ndarray], types: Mapping[str, int]) -> bool:
    """Whether a node splits floats into parts of different sizes, by tables that the host copies for each run."""
    if node.domain or node.op_type != "Split" or len(node.input) < 2 or types.get(node.input[0]) not in FLOATS:
        return False
    sizes = constants.get(node.input[1])
    return sizes is not None and len({*sizes.tolist()}) > 1


def slice_apart(w: Replacement) -> None:
    """Split into parts of different sizes, which a CUDA graph can hold."""
    axis, sizes = w.ints(w.attribute("axis", 0)), w.known_value(1, "sizes").tolist()
    ends = [sum(sizes[: place + 1]) for place in range(len(sizes))]
    parts = []
    for start, end, name in zip([0, *ends[:-1]], ends, w.node.output, strict=True):
        parts.append(w("Slice", w.node.input[0], w.ints(start), w.ints(end), axis) if name else "")
    w.done(*parts)


def _looks_up_rows(node: onnx.NodeProto, context: Context) -> bool:
    """Whether each index of a GatherND is one number, as in Gather. Its CUDA kernel copies a table from the host."""
    if node.domain or node.op_type != "GatherND" or attribute(node, "batch_dims", 0):
        return False
    places = shapes.shape(context.types, node.input[1])
    return places is not None and places[-1:] == [1]


def gather(w: Replacement) -> None:
    """GatherND whose indices are single numbers."""
    data, places = w.node.input
    w.done(w("Gather", data, w("Squeeze", places, w.ints(-1)), axis=0))


REDESCRIBED = (normalize_batch, pad_evenly, join_in_parts)
"""Rewrites after which values are described again, because the element types of their outputs are needed."""


def rows_by_product(w: Replacement) -> None:
    """ReduceSum over the last axis as a product with ones."""
    # cuBLAS takes an eighth of the time of cuDNN's reduction.
    one = onnx.numpy_helper.from_array(np.ones(1, np.float32))
    length = w("Shape", w.node.input[0], start=-1)
    ones = w("ConstantOfShape", w("Concat", length, w.ints(1), axis=0), value=one)
    w.done(w("MatMul", w.node.input[0], ones))


def _is_zeros(node: onnx.NodeProto | None) -> bool:
    return node is not None and node.op_type == "ConstantOfShape" and not node.attribute


def add_integers(w: Replacement, *, onto_zeros: bool) -> None:
    """ScatterElements with addition, in integers, whose sum does not depend on the order.

    Addends are scaled by a power of two, so that the largest has BITS bits. A NaN or infinite addend makes all of them
    NaN or infinite.
    """
    data, places, updates = w.node.input[:3]
    axis = w.attribute("axis", 0)
    largest = w("Max", w("ReduceMax", w("Abs", updates), keepdims=0), w.constant(SMALLEST))
    exponent = w("Floor", w("Mul", w("Log", largest), w.constant(1 / math.log(2))))
    two, bits = w.constant(2.0), w.constant(float(BITS))
    scale, back = w("Pow", two, w("Sub", bits, exponent)), w("Pow", two, w("Sub", exponent, bits))
    # 0 times a NaN or an infinity is NaN, which the integers cannot hold.
    nothing = w("ReduceSum", w("Mul", updates, w.constant(0.0)), keepdims=0)
    integers = w("Cast", w("Mul", updates, scale), to=TensorProto.INT64)
    empty = w("ConstantOfShape", w("Shape", data), value=onnx.numpy_helper.from_array(np.zeros(1, np.int64)))
    added = w("ScatterElements", empty, places, integers, axis=axis, reduction="add")
    result = w("Mul", w("Cast", added, to=TensorProto.FLOAT), w("Add", back, nothing))
    w.done(result if onto_zeros else w("Add", data, result))


def _plain_transposes(graph: onnx.GraphProto) -> None:
    """Remove the Reshapes that keep ONNX Runtime from reading a matrix transposed; cuBLAS transposes at no cost."""
    constants = constants_of(graph)
    turned = {
        node.output[0] for node in graph.node
        if node.op_type == "Transpose" and list(attributes_of(node).get("perm", ())) == [1, 0]
    }  # fmt: skip
    names = {
        node.output[0]: node.input[0]
        for node in graph.node
        if node.op_type == "Reshape" and node.input[0] in turned and node.input[1] in constants
        and constants[node.input[1]].tolist() == [0, -1]
    }  # fmt: skip
    outputs = {value.name for value in graph.output}
    names = {old: new for old, new in names.items() if old not in outputs}
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
    prune(graph)
    sort_nodes(graph)
