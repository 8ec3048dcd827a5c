"""Matrix products.

The gradient of a matrix without batch axes is one product over all rows, the form that `optimize` and the kernels
recognise. Others use FusedMatMul, which every ONNX Runtime has and which reads a transposed factor without copying it.

Rules for divided inputs are for products that have no weight of a divided layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx

from ortflow.workflow.graph.domains import MICROSOFT
from ortflow.workflow.graph.ir import shapes
from ortflow.workflow.graph.ir.edit import attributes_of
from ortflow.workflow.graph.ir.replacement import attribute
from ortflow.workflow.graph.operators.by_element import beside, met
from ortflow.workflow.graph.rules.cost import Sizes, cost_rule
from ortflow.workflow.graph.rules.gradient import Backward, Dims, Gradients, gradient_rule
from ortflow.workflow.graph.rules.precision import half_products
from ortflow.workflow.graph.rules.size import Type, size_rule
from ortflow.workflow.graph.rules.spread import Cuts, Spread, division_rule
from ortflow.workflow.graph.rules.traits import Trait, describe, weights


@gradient_rule("MatMul")
def matrix_product(b: Backward) -> Gradients:
    ranks = b.rank(0), b.rank(1)
    a, c = b.input(0), b.input(1)
    left_dims, right = (shapes.named_shape(b.context.types, name) or [] for name in (a, c))
    gradient = b.gradient()
    # A vector is a matrix of one row on the left, and of one column on the right.
    if ranks[0] == 1:
        a, left_dims = b("Unsqueeze", a, b.ints(0)), [1, *left_dims]
        gradient = b("Unsqueeze", gradient, b.ints(-1 if ranks[1] == 1 else -2))
    if ranks[1] == 1:
        c, right = b("Unsqueeze", c, b.ints(1)), [*right, 1]
        gradient = b("Unsqueeze", gradient, b.ints(-1))
    for place, gradient_of in _of_matrices(b, gradient, a, left_dims, c, right):
        yield place, gradient_of if ranks[place] > 1 else b("Squeeze", gradient_of, b.ints(place))


def _of_matrices(b: Backward, gradient: str, a: str, left_dims: Dims, c: str, right: Dims) -> Gradients:
    """Gradients of the product of `a` and `c`, whose sizes are `left_dims` and `right`, with at least two axes.

    The gradient of the right factor, usually a weight, comes first: `a` can then be freed before its own is computed.
    """
    batch = _batch(left_dims, right)
    if b.wants(1):
        if len(left_dims) == len(right) == 2:
            yield 1, b("Gemm", a, gradient, transA=1)
        elif len(right) == 2:
            yield 1, b("Gemm", _rows(b, a, left_dims), _rows(b, gradient, [*left_dims[:-1], right[-1]]), transA=1)
        else:
            product = b("FusedMatMul", a, gradient, domain=MICROSOFT, transA=1)
            yield 1, b.summed_to(product, c, right, [*batch, *right[-2:]])
    if b.wants(0):
        if len(left_dims) == len(right) == 2:
            yield 0, b("Gemm", gradient, c, transB=1)
        else:
            product = b("FusedMatMul", gradient, c, domain=MICROSOFT, transB=1)
            yield 0, b.summed_to(product, a, left_dims, [*batch, *left_dims[-2:]])


def _batch(left_dims: Dims, right: Dims) -> list[int | str | None]:
    """Sizes of a product's batch axes."""
    count = max(len(left_dims), len(right)) - 2
    padded = [[*[1] * (count + 2 - len(dims)), *dims[:-2]] for dims in (left_dims, right)]
    return [_wider(a, b) for a, b in zip(*padded, strict=True)]


def _wider(a: int | str | None, b: int | str | None) -> int | str | None:
    """The size of an axis after broadcasting."""
    if a == 1 or a == b:
        return b
    if b == 1 or isinstance(a, int):
        return a
    return b if isinstance(b, int) else None


def _turned(b: Backward, value: str, rank: int) -> str:
    return b("Transpose", value, perm=[*range(rank - 2), rank - 1, rank - 2])


def _rows(b: Backward, value: str, dims: Dims) -> str:
    """A value as a matrix with the same last axis."""
    if isinstance(dims[-1], int) and dims[-1] > 0:
        return b("Reshape", value, b.ints(-1, dims[-1]))
    return b("Reshape", value, b("Concat", b.ints(-1), b("Shape", value, start=-1), axis=0))


@gradient_rule("Gemm")
def general_product(b: Backward) -> Gradients:
    """alpha op(A) op(B) + beta C."""
    a, c, gradient = b.input(0), b.input(1), b.gradient()
    turn_a, turn_b = b.attribute("transA", 0), b.attribute("transB", 0)
    alpha, beta = b.attribute("alpha", 1.0), b.attribute("beta", 1.0)
    scale: dict[str, Any] = {} if alpha == 1 else {"alpha": alpha}
    if b.wants(2):
        of_bias = b.summed(gradient, b.input(2), b.output(0))
        yield 2, of_bias if beta == 1 else b("Mul", of_bias, b.number(beta))
    if b.wants(1):
        if turn_b:
            yield 1, b("Gemm", gradient, a, **_turns(1, turn_a), **scale)
        else:
            yield 1, b("Gemm", a, gradient, **_turns(1 - turn_a, 0), **scale)
    if b.wants(0):
        if turn_a:
            yield 0, b("Gemm", c, gradient, **_turns(turn_b, 1), **scale)
        else:
            yield 0, b("Gemm", gradient, c, **_turns(0, 1 - turn_b), **scale)


def _turns(a: int, b: int) -> dict[str, Any]:
    return {"transA": a, "transB": b}


@gradient_rule("FusedMatMul", domain=MICROSOFT)
def fused_product(b: Backward) -> Gradients:
    """alpha op(A) op(B), with the last two axes of each factor transposed or not."""
    if b.attribute("transBatchA", 0) or b.attribute("transBatchB", 0):
        raise b.refusal("it transposes batch axes")
    alpha, values, dims = b.attribute("alpha", 1.0), [], []
    turns = b.attribute("transA", 0), b.attribute("transB", 0)
    for place, turned in enumerate(turns):
        size = list(shapes.named_shape(b.context.types, b.input(place)) or [])
        if len(size) < 2:
            raise b.refusal("the rank of its input is not known, or is below 2")
        values.append(_turned(b, b.input(place), len(size)) if turned else b.input(place))
        dims.append([*size[:-2], size[-1], size[-2]] if turned else size)
    gradient = b.gradient() if alpha == 1 else b("Mul", b.gradient(), b.number(alpha))
    for place, gradient_of in _of_matrices(b, gradient, values[0], dims[0], values[1], dims[1]):
        yield place, _turned(b, gradient_of, len(dims[place])) if turns[place] else gradient_of


@division_rule("MatMul")
def product_of_parts(s: Spread, place: int, node: onnx.NodeProto, input_cuts: Cuts) -> Cuts:
    shapes = [s.shape(name) for name in node.input]
    ranks = [len(shape) for shape in shapes]
    rank = max(ranks)
    if min(ranks) < 2:
        raise s.unsupported(node)
    batch = {cut.at(cut.axis + rank - ranks[slot]) for slot, cut in enumerate(input_cuts) if cut is not None}
    if len(batch) == 1 and next(iter(batch)).axis < rank - 2:
        return [met(s, place, node, input_cuts, batch.pop(), rank)]
    a, b = input_cuts
    if a is not None and b is None and a.axis == ranks[0] - 2:
        s.copy(place, 1)
        return [a.at(rank - 2)]
    if b is not None and a is None and b.axis == ranks[1] - 1:
        s.copy(place, 0)
        return [b.at(rank - 1)]
    raise s.unsupported(node)


@division_rule("Gemm")
def general_product_of_parts(s: Spread, place: int, node: onnx.NodeProto, input_cuts: Cuts) -> Cuts:
    a, flags = input_cuts[0], attributes_of(node)
    if a is None or any(input_cuts[1:]) or a.axis != 0 or flags.get("transA", 0):
        raise s.unsupported(node)
    s.copy(place, 1)
    if len(node.input) > 2 and node.input[2]:
        beside(s, place, 2, a, 2)
    return [a]


@size_rule("FusedMatMul", "Product")
def product_size(node: onnx.NodeProto, place: int, types: Mapping[str, Type]) -> Type | None:
    """Shape of A times B, each transposed in its last two axes if the node's attributes say so."""
    if place or len(node.input) < 2:
        return None
    left_type, other = types.get(node.input[0]), types.get(node.input[1])
    if left_type is None or other is None or min(len(left_type[1]), len(other[1])) < 2:
        return None
    flags = {flag.name: flag.i for flag in node.attribute if flag.type == onnx.AttributeProto.INT}
    a, b = (
        (*shape[:-2], shape[-1], shape[-2]) if flags.get(name) else shape
        for name, shape in (("transA", left_type[1]), ("transB", other[1]))
    )
    try:
        return left_type[0], (*np.broadcast_shapes(a[:-2], b[:-2]), a[-2], b[-1])
    except ValueError:
        return None


@cost_rule("FusedMatMul", "Gemm", "MatMul")
def products_of_rows(node: onnx.NodeProto, sizes: Sizes) -> int:
    factor = sizes.dims(node.input[0])
    if not factor:
        return 0
    rows = 0 if node.op_type == "Gemm" else -2
    return 2 * sizes.elements(node.output[0]) * factor[rows if attribute(node, "transA", 0) else -1]


@cost_rule("Einsum", exact=False)
def products_of_sums(node: onnx.NodeProto, sizes: Sizes) -> int:
    return 2 * max(sizes.elements(name) for name in (*node.input, *node.output))


half_products("MatMul", "Gemm")
half_products("FusedMatMul", domain=MICROSOFT)
weights(["MatMul", "FusedMatMul"], 0, 1)
weights(["Gemm"], 0, 1, 2)
weights(["Einsum"], *range(64))
describe(["MatMul", "Gemm", "FusedMatMul"], Trait.KEEPS_TYPE, Trait.LINEAR)
describe(["Einsum"], Trait.LINEAR)
describe(["MatMul", "Gemm", "Einsum"], Trait.HEAVY)
