"""MatMul, FusedMatMul and Gemm with the Transposes, the scale and the bias around them; see product.c."""

from __future__ import annotations

from collections.abc import Sequence

import onnx

from ortflow.workflow.graph.domains import CPU_DOMAIN, MICROSOFT
from ortflow.workflow.graph.ir.edit import attributes_of
from ortflow.workflow.graph.ir.rewriter import MOST_AXES, Rewriter


def put(rewriter: Rewriter) -> None:
    """Replace every product of fp32 matrices."""
    for node in [*rewriter.nodes("MatMul"), *rewriter.nodes("FusedMatMul", MICROSOFT), *rewriter.nodes("Gemm")]:
        _replace(rewriter, node)
    for node in rewriter.nodes("Product", CPU_DOMAIN):
        _see_through(rewriter, node)


def _replace(rewriter: Rewriter, node: onnx.NodeProto) -> None:
    flags = attributes_of(node)
    bias: list[str] = []
    if not any(rewriter.is_fp32(name) for name in (*node.input, *node.output)):
        return
    if node.op_type == "Gemm":
        if len(node.input) > 2 and node.input[2]:
            dims = rewriter.dims(node.input[2])
            columns = rewriter.dims(node.output[0])
            if flags.get("beta", 1.0) != 1.0 or dims is None or columns is None or dims != columns[-1:]:
                return
            bias = [node.input[2]]
    else:
        ranks = [len(dims) if (dims := rewriter.dims(name)) is not None else 0 for name in node.input]
        if min(ranks) < 2 or max(ranks) > MOST_AXES or flags.get("transBatchA") or flags.get("transBatchB"):
            return
    rewriter.drop(node)
    rewriter.add(
        "Product",
        [*node.input[:2], *bias],
        node.output,
        turn_a=int(flags.get("transA", 0)),
        turn_b=int(flags.get("transB", 0)),
        view_a=0,
        view_b=0,
        view_y=0,
        alpha=float(flags.get("alpha", 1.0)),
    )


def _see_through(rewriter: Rewriter, node: onnx.NodeProto) -> None:
    """Merge the Transposes next to the product into it, and the addition of a bias."""
    flags, inputs, output = attributes_of(node), list(node.input), node.output[0]
    gone = [node]
    for place, view in ((0, "view_a"), (1, "view_b")):
        inputs[place], order = _behind_transposes(rewriter, inputs[place])
        flags[view] = _number(order) if list(order) != sorted(order) else 0
    reader = rewriter.only_reader(output)
    order = _order(reader)
    # The output's last axis is a row or column axis of the product; product.c supports no other.
    if len(inputs) == 2 and reader is not None and order and order[-1] >= len(order) - 2:
        gone.append(reader)
        output = reader.output[0]
        flags["view_y"] = _number(order)
    elif len(inputs) == 2 and reader is not None and reader.op_type == "Add":
        bias = _bias(rewriter, reader, output)
        if bias is not None:
            gone.append(reader)
            inputs.append(bias)
            output = reader.output[0]
    rewriter.drop(*gone)
    rewriter.add("Product", inputs, [output], **flags)


def _behind_transposes(rewriter: Rewriter, value: str) -> tuple[str, Sequence[int]]:
    """The value before the Transposes of a factor and the resulting axis order; empty if there is no Transpose.

    The factor's last axis in memory remains a row or column axis; anything else would be packed element by element.
    """
    origin: tuple[str, Sequence[int]] = value, ()
    turns: Sequence[int] = ()
    while (turn := rewriter.maker(value)) is not None and (order := _order(turn)):
        value, turns = turn.input[0], [order[axis] for axis in turns] if turns else order
        if len(turns) - 1 in turns[-2:]:
            origin = value, turns
    return origin


def _order(node: onnx.NodeProto | None) -> Sequence[int]:
    """The permutation of a Transpose of supported rank; else empty."""
    if node is None or node.op_type != "Transpose" or node.domain != "":
        return ()
    order: Sequence[int] = attributes_of(node).get("perm", ())
    return order if 2 <= len(order) <= MOST_AXES else ()


def _number(order: Sequence[int]) -> int:
    return int("1" + "".join(str(axis) for axis in order))


def _bias(rewriter: Rewriter, add: onnx.NodeProto, product: str) -> str | None:
    """The vector that an Add adds to each row of the product."""
    if add.input[0] == add.input[1]:
        return None
    other = add.input[1] if add.input[0] == product else add.input[0]
    dims, columns = rewriter.dims(other), rewriter.dims(product)
    fits = dims is not None and columns is not None and len(dims) == 1 and dims == columns[-1:]
    return other if fits and isinstance(dims, tuple) and isinstance(dims[0], int) else None
