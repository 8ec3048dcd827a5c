"""Inserts this package's operators into the training and optimizer graphs. Called by step `configure`."""

from __future__ import annotations

import onnx

from ortflow.workflow.graph.domains import CPU_DOMAIN
from ortflow.workflow.graph.ir.rewriter import Rewriter
from ortflow.workflow.kernels import (
    adam,
    batch_norm,
    convolution,
    cross_entropy,
    dropout,
    gelu,
    group_norm,
    norm,
    pooling,
    product,
    recompute,
    rotary,
    scaling,
    scatter,
    softmax,
    table,
)

_MODULES = (
    dropout, convolution, pooling, batch_norm, group_norm, gelu, norm, rotary, product, softmax, table, scatter,
    cross_entropy, adam, scaling,
)  # fmt: skip


def with_kernels(model: onnx.ModelProto, length: int = 0) -> onnx.ModelProto:
    """Return a copy of the graph with our operators wherever they are supported.

    Parameters
    ----------
    model
        The training or optimizer graph.
    length
        Number of tokens, if the graph leaves it open. Long attention recomputes its weights, which saves memory.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    rewriter = Rewriter(copy.graph)
    for node in rewriter.nodes("Identity"):
        rewriter.pass_by(node)
    for module in _MODULES:
        module.put(rewriter)
    recompute.put(rewriter, length)
    rewriter.finish()
    if all(opset.domain != CPU_DOMAIN for opset in copy.opset_import):
        copy.opset_import.append(onnx.helper.make_opsetid(CPU_DOMAIN, 1))
    return copy
