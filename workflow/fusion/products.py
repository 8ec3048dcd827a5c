"""Replaces linear layers and their gradients by cuBLASLt products, in a half-precision training graph. Pure.

ONNX Runtime's product writes halves and cannot transpose its factors. `Product` transposes either factor, adds a bias
and a residual, and writes the gradient of a weight in fp32, so adjacent Transposes, Casts and additions are removed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import onnx
from onnx import TensorProto

from ortflow.workflow.graph.domains import CUDA_DOMAIN, MICROSOFT
from ortflow.workflow.graph.ir.edit import attributes_of, described, import_domain
from ortflow.workflow.graph.ir.rewriter import Rewriter, width_of

_TURNED = [1, 0]
_PLAIN = {"transBatchA", "transBatchB"}


@dataclass(frozen=True)
class _Factor:
    value: str
    turned: bool
    rank: int

    @property
    def flipped(self) -> _Factor:
        return replace(self, turned=not self.turned)


def put_products(model: onnx.ModelProto, kind: int) -> onnx.ModelProto:
    """A copy with Product for each product of halves, of the element type `kind`, whose second factor is a matrix."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    rewriter = Rewriter(copy.graph, CUDA_DOMAIN)
    types = {name: description.type.tensor_type.elem_type for name, description in described(copy.graph).items()}
    for node in [*rewriter.nodes("MatMul"), *rewriter.nodes("FusedMatMul", MICROSOFT)]:
        if {types.get(name) for name in (*node.input, *node.output)} == {kind}:
            _put(rewriter, node, kind)
    rewriter.finish()
    import_domain(copy, CUDA_DOMAIN)
    return copy


def _put(rewriter: Rewriter, node: onnx.NodeProto, kind: int) -> None:
    attributes = attributes_of(node)
    if attributes.get("alpha", 1.0) != 1.0 or any(attributes.get(name) for name in _PLAIN):
        return
    turns = bool(attributes.get("transA", 0)), bool(attributes.get("transB", 0))
    factors = [_factor(rewriter, value, turned) for value, turned in zip(node.input, turns, strict=True)]
    a, b = factors
    if a is None or b is None or b.rank != 2 or a.rank < 2 or (a.turned and a.rank != 2):
        return
    out, dropped = node.output[0], [node]
    turn = rewriter.only_reader(out)
    while a.rank == 2 and turn is not None and _turns(turn):
        # (a b)' = b' a'; the gradient of a weight that is stored transposed may be turned twice. In a Llama of
        # 3 billion parameters such gradients, rounded between the turns, cost 3.5 ms a step (docs/benchmarks.md).
        a, b, out = b.flipped, a.flipped, turn.output[0]
        dropped.append(turn)
        turn = rewriter.only_reader(out)
    cast = rewriter.only_reader(out)
    inputs = [a.value, b.value]
    if cast is not None and _casts(cast, TensorProto.FLOAT) and cast.output[0] in rewriter.outputs:
        out = cast.output[0]
        dropped.append(cast)
    elif (addition := _sum(rewriter, cast, kind)) is not None:
        out = addition.out
        dropped += addition.nodes
        if addition.bias:
            half = f"{out}/bias"
            rewriter.describe(half, kind, rewriter.dims(addition.bias) or ())
            # The epilogue of cuBLASLt takes a bias of the result's type alone.
            rewriter("Cast", addition.bias, output=half, to=kind)
            inputs.append(half)
        if addition.residual:
            inputs += [*([] if addition.bias else [""]), addition.residual]
    rewriter.drop(*dropped)
    rewriter.add("Product", inputs, [out], turn_a=int(a.turned), turn_b=int(b.turned))


def _factor(rewriter: Rewriter, value: str, turned: bool) -> _Factor | None:
    """A factor as stored in memory; None if its axes are unknown."""
    dims, maker = rewriter.dims(value), rewriter.maker(value)
    if dims is None:
        return None
    if maker is not None and _turns(maker):
        return _Factor(maker.input[0], not turned, 2)
    return _Factor(value, turned, len(dims))


@dataclass(frozen=True)
class _Sum:
    """What is added to a product: `bias` is a vector, `residual` a half of the product's rank; each may be empty."""

    bias: str
    residual: str
    out: str
    """The sum's half."""
    nodes: list[onnx.NodeProto]


def _sum(rewriter: Rewriter, cast: onnx.NodeProto | None, kind: int) -> _Sum | None:
    """The additions between a product and the rounding of the sum, if no other node reads what lies between."""
    if cast is None or not _casts(cast, TensorProto.FLOAT):
        return None
    bias = residual = ""
    value, nodes = str(cast.output[0]), [cast]
    dims = rewriter.dims(cast.input[0])
    width = width_of(dims)
    while (node := rewriter.only_reader(value)) is not None and node.op_type == "Add" and not node.domain:
        (other,) = [name for name in node.input if name != value] or [""]
        widened = rewriter.maker(other)
        if not bias and width and rewriter.is_fp32(other) and rewriter.dims(other) == (width,):
            bias = other
        elif not residual and widened is not None and _widens(widened, kind, rewriter) and width:
            residual = str(widened.input[0])
            # Other axes may differ at run time: the operator then broadcasts.
            if len(rewriter.dims(residual) or ()) != len(dims or ()) or width_of(rewriter.dims(residual)) != width:
                return None
        else:
            return None
        nodes.append(node)
        value = str(node.output[0])
    if node is None or not (bias or residual) or not _casts(node, kind):
        return None
    return _Sum(bias, residual, str(node.output[0]), [*nodes, node])


def _widens(node: onnx.NodeProto, kind: int, rewriter: Rewriter) -> bool:
    """Whether a node converts a half to fp32."""
    return _casts(node, TensorProto.FLOAT) and rewriter.element(node.input[0]) == kind


def _turns(node: onnx.NodeProto) -> bool:
    return bool(
        node.op_type == "Transpose" and not node.domain and list(attributes_of(node).get("perm", ())) == _TURNED
    )


def _casts(node: onnx.NodeProto, kind: int) -> bool:
    return bool(node.op_type == "Cast" and not node.domain and attributes_of(node)["to"] == kind)
