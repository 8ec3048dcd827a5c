"""Replaces slow nodes of the training graph by faster ones; results change only by rounding.

Called by `assembly`: `before` the graph is differentiated and `after`. Measured on the CPU, where a step of a small
transformer spends a third of its time outside matrix products.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import numpy_helper

from ortflow.workflow.graph.domains import MICROSOFT
from ortflow.workflow.graph.ir.edit import Editor, attributes_of, bypass, constants_of, described, dims_of
from ortflow.workflow.graph.ir.order import prune, sort_nodes
from ortflow.workflow.graph.optimize import gelu, group_norm, rms

Dims = tuple[int | str | None, ...]
_NORM_GRADIENTS = ("LayerNormalizationGrad", "SimplifiedLayerNormalizationGrad")


def before(graph: onnx.GraphProto) -> None:
    """Insert forms with a cheaper gradient, in place."""
    _casts(graph)
    gelu.fuse(graph)
    rms.fuse(graph)
    group_norm.fuse(graph)
    _powers(graph)


def after(graph: onnx.GraphProto) -> None:
    """Insert kernels that use all threads and make fewer passes over memory, in place."""
    gelu.unfuse(graph)
    rms.unfuse(graph)
    edit = Editor(graph)
    rows = _Rows(edit)
    _bias_gradients(graph, rows)
    _norm_gradients(graph, edit, rows)
    _weight_gradients(graph, edit)
    sort_nodes(graph)
    prune(graph)


def _casts(graph: onnx.GraphProto) -> None:
    """Bypass a Cast to the element type that a value already has; normalisations often have two."""
    kinds = {name: value.type.tensor_type.elem_type for name, value in described(graph).items()}

    def source(node: onnx.NodeProto) -> str:
        is_useless = (
            node.op_type == "Cast" and node.domain == "" and kinds.get(node.input[0], 0) == attributes_of(node)["to"]
        )
        return node.input[0] if is_useless else ""

    if bypass(graph, source):
        prune(graph)


def _powers(graph: onnx.GraphProto) -> None:
    """x^2 and x^3 by multiplication."""
    # ONNX Runtime's kernel of Pow takes ten times as long.
    edit = Editor(graph)
    constants = constants_of(graph)
    for node in list(graph.node):
        if node.op_type != "Pow" or node.domain != "":
            continue
        exponent = constants.get(node.input[1])
        if exponent is None or exponent.size != 1 or float(exponent.reshape(-1)[0]) not in (2.0, 3.0):
            continue
        x, result = node.input[0], node.output[0]
        graph.node.remove(node)
        if float(exponent.reshape(-1)[0]) == 2.0:
            edit("Mul", x, x, output=result)
        else:
            edit("Mul", edit("Mul", x, x), x, output=result)
    sort_nodes(graph)


class _Rows:
    """Sums over all axes but the last, as products with ones.

    Takes half the time of ReduceSum on one thread and a third on two, and is twice as accurate, since it adds in
    blocks.
    """

    def __init__(self, edit: Editor) -> None:
        self._edit = edit
        self._ones: dict[Dims, str] = {}

    def sum(self, value: str, dims: Dims, output: str) -> None:
        """The sum of a value with these `dims`; values with equally many rows share the ones."""
        edit, width = self._edit, dims[-1]
        assert isinstance(width, int)
        if dims[:-1] not in self._ones:
            count = edit("Div", edit("Size", value), edit.constant(width, "int64"))
            shape = edit("Concat", edit.ints(1), edit("Reshape", count, edit.ints(1)), axis=0)
            one = numpy_helper.from_array(np.ones(1, np.float32))
            self._ones[dims[:-1]] = edit("ConstantOfShape", shape, value=one)
        product = edit("MatMul", self._ones[dims[:-1]], edit("Reshape", value, edit.ints(-1, width)))
        edit("Reshape", product, edit.ints(width), output=output)


def _bias_gradients(graph: onnx.GraphProto, rows: _Rows) -> None:
    """Replace ReduceSum over all axes but the last."""
    constants = constants_of(graph)
    shapes = _known_shapes(graph)
    for node in list(graph.node):
        if node.op_type != "ReduceSum" or len(node.input) != 2 or node.input[1] not in constants:
            continue
        dims = shapes.get(node.input[0])
        axes = sorted(int(axis) for axis in constants[node.input[1]].reshape(-1))
        keeps = next((a.i for a in node.attribute if a.name == "keepdims"), 1)
        if dims is not None and not keeps and axes and axes == list(range(len(dims) - 1)):
            graph.node.remove(node)
            rows.sum(node.input[0], dims, node.output[0])


def _norm_gradients(graph: onnx.GraphProto, edit: Editor, rows: _Rows) -> None:
    """LayerNormalization's gradient in parallel kernels; ONNX Runtime's own is single-threaded.

    With n = (x - mean) / deviation, g = dy * scale and means over the last axis of D elements:
    dx = (g - mean(g) - n mean(g n)) / deviation. The means are products of dy and of dy n with scale / D. For root mean
    square normalisation, the mean is 0 and mean(g) is omitted.
    """
    shapes = _known_shapes(graph)
    for node in list(graph.node):
        if node.op_type not in _NORM_GRADIENTS or node.domain != MICROSOFT:
            continue
        dy, x, scale, *means, inverse = node.input
        axis = next((a.i for a in node.attribute if a.name == "axis"), -1)
        dims = shapes.get(x)
        if dims is None or axis not in (-1, len(dims) - 1):
            continue
        width = dims[-1]
        assert isinstance(width, int)
        graph.node.remove(node)
        column = edit("Mul", scale, edit.constant(1 / width))
        column = edit("Reshape", column, edit.ints(width, 1))
        normal = edit("Mul", edit("Sub", x, means[0]) if means else x, inverse)
        turned = edit("Mul", dy, normal)
        if len(node.output) > 1 and node.output[1]:
            rows.sum(turned, dims, node.output[1])
        if len(node.output) > 2 and node.output[2]:
            rows.sum(dy, dims, node.output[2])
        if node.output[0]:
            along = edit("Mul", normal, edit("MatMul", turned, column))
            rest = edit("Sub", edit("Mul", dy, scale), along)
            if means:
                rest = edit("Sub", rest, edit("MatMul", dy, column))
            edit("Mul", rest, inverse, output=node.output[0])


def _known_shapes(graph: onnx.GraphProto) -> dict[str, Dims]:
    """fp32 values of at least two axes whose last size is a number and whose other sizes have at least names."""
    floating = {n: v for n, v in described(graph).items() if v.type.tensor_type.elem_type == onnx.TensorProto.FLOAT}
    shapes = {name: dims_of(value) for name, value in floating.items()}
    return {n: d for n, d in shapes.items() if d and len(d) > 1 and isinstance(d[-1], int) and None not in d}


def _weight_gradients(graph: onnx.GraphProto, edit: Editor) -> None:
    """x^T dy as a product of matrices in their stored layout.

    The smaller factor is transposed; if that is dy, so is the result.
    """
    # ONNX Runtime's Gemm would transpose its first factor once per block.
    shapes = {name: dims_of(value) for name, value in described(graph).items()}

    def turned(value: str) -> str:
        # The Reshape, which changes nothing, keeps ONNX Runtime from fusing Transpose and product again.
        return edit("Reshape", edit("Transpose", value, perm=[1, 0]), edit.ints(0, -1))

    for node in list(graph.node):
        flags = attributes_of(node)
        dims = shapes.get(node.output[0])
        if (
            node.op_type != "Gemm"
            or len(node.input) != 2
            or (flags.get("transA", 0), flags.get("transB", 0), flags.get("alpha", 1.0)) != (1, 0, 1.0)
            or dims is None
            or not isinstance(dims[0], int)
            or not isinstance(dims[1], int)
        ):
            continue
        x, dy = node.input
        graph.node.remove(node)
        if dims[0] <= dims[1]:
            edit("MatMul", turned(x), dy, output=node.output[0])
        else:
            edit("Transpose", edit("MatMul", turned(dy), x), output=node.output[0], perm=[1, 0])
