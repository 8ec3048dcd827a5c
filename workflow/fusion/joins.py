"""Concat of tensors of different sizes as copies on the GPU: see `ortflow.workflow.cuda.join`. Pure.

Called on a training graph that is run with our operators. Of tensors of one size ONNX Runtime's kernel is captured too.
"""

from __future__ import annotations

import onnx
from onnx import TensorProto

from ortflow.workflow.graph.domains import CUDA_DOMAIN
from ortflow.workflow.graph.ir.edit import attributes_of, described, dims_of, import_domain
from ortflow.workflow.graph.ir.element_types import element_types
from ortflow.workflow.graph.ir.order import sort_nodes

KINDS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16})
MOST_INPUTS = 60
"""operators.c passes 64 at most."""


def put_joins(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy with Join for each Concat of floats whose parts are not known to be of one size."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    sort_nodes(copy.graph)
    types, known = element_types(copy), described(copy.graph)
    put = False
    for node in copy.graph.node:
        if node.op_type != "Concat" or node.domain or not 1 < len(node.input) <= MOST_INPUTS:
            continue
        kinds = {types.get(name) for name in (*node.input, *node.output)}
        if len(kinds) > 1 or not KINDS.issuperset(kinds):
            continue
        axis = attributes_of(node)["axis"]
        dims = [dims_of(known[name]) if name in known else None for name in node.input]
        sizes = [each[axis] if each else None for each in dims]
        if len(set(sizes)) > 1 or not isinstance(sizes[0], int):
            node.op_type, node.domain, put = "Join", CUDA_DOMAIN, True
    if put:
        import_domain(copy, CUDA_DOMAIN)
    return copy
