"""Inserts our GPU operators into a training graph; called by step `configure` for half precision. Pure.

Patterns are those of the CPU operators (`ortflow.workflow.kernels`).
"""

from __future__ import annotations

import onnx
from onnx import TensorProto

from ortflow.workflow.cuda import images
from ortflow.workflow.graph.autodiff.compose import compose
from ortflow.workflow.graph.domains import CUDA_DOMAIN
from ortflow.workflow.graph.ir import shapes
from ortflow.workflow.graph.ir.edit import import_domain
from ortflow.workflow.graph.ir.order import sort_nodes
from ortflow.workflow.graph.ir.rewriter import Rewriter
from ortflow.workflow.graph.optimize import rewrites
from ortflow.workflow.kernels import cross_entropy, dropout, norm, rotary, softmax, table


def completed(model: onnx.ModelProto, *, halves: bool = False) -> onnx.ModelProto:
    """A copy of a differentiated training graph with our operators, with all compositions done and every value
    described. `halves`: for half precision.
    """
    copy = place(model, halves=halves)
    rewrites.after(copy.graph)
    copy = compose(copy)
    # Elementwise nodes are grouped by their shapes.
    shapes.infer(copy, list(copy.graph.value_info))
    return copy


def place(model: onnx.ModelProto, *, halves: bool = False) -> onnx.ModelProto:
    """A copy of a differentiated training graph, before composition, with our operators wherever they are supported.

    All values stay fp32; each output of our operators is described. `halves`: with images channels last, and operators
    that compute in half precision only.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    if halves:
        sort_nodes(copy.graph)
    rewriter = Rewriter(copy.graph, CUDA_DOMAIN)
    for node in rewriter.nodes("Identity"):
        rewriter.pass_by(node)
    # Before images are turned: the mask follows the order of the elements, and is the same in every form.
    dropout.put(rewriter)
    if halves:
        images.put(rewriter)
    _norms(rewriter)
    _sums(rewriter)
    _cross_entropy(rewriter)
    _tables(rewriter)
    rotary.put(rewriter)
    softmax.put(rewriter)
    for node in rewriter.all_nodes():
        for name in node.output if node.domain == CUDA_DOMAIN else ():
            # Shape inference has not found all of their shapes.
            rewriter.describe(name, TensorProto.FLOAT, None)
    rewriter.finish()
    import_domain(copy, CUDA_DOMAIN)
    return copy


def _norms(rewriter: Rewriter) -> None:
    for match in norm.norms(rewriter):
        rewriter.drop(match.node)
        rewriter.add(match.operator, match.inputs, match.outputs, **match.attributes)


def _sums(rewriter: Rewriter) -> None:
    for node, axes in norm.leading_sums(rewriter):
        if rewriter.is_fp32(node.input[0]) and rewriter.is_fp32(node.output[0]):
            rewriter.drop(node)
            rewriter.add("ColumnSums", node.input[:1], node.output, axes=axes)


def _cross_entropy(rewriter: Rewriter) -> None:
    """Replace each loss with its gradients, if no other node reads the log-probabilities."""
    gradients = cross_entropy.gradients(rewriter)
    for loss in cross_entropy.losses(rewriter):
        (scores, labels), out, ignored = loss.input, loss.output[0], cross_entropy.ignored(loss)
        logarithms = loss.output[1] if len(loss.output) > 1 else ""
        readers = [node for node in gradients if node.input[1] == logarithms and node.input[2] == labels]
        fits = all(cross_entropy.ignored(node) == ignored for node in readers)
        if logarithms and not (fits and rewriter.are_read_by(logarithms, readers)):
            continue
        rows = (rewriter.dims(scores) or (None,))[0]
        lse = f"{logarithms or out}/lse"
        rewriter.describe(lse, TensorProto.FLOAT, (rows,))
        rewriter.drop(loss, *readers)
        rewriter.add("CrossEntropy", [labels, scores], [out, lse], ignore=ignored)
        for node in readers:
            rewriter.add("CrossEntropyGrad", [labels, node.input[0], scores, lse], node.output, ignore=ignored)


def _tables(rewriter: Rewriter) -> None:
    """Replace the gradients of tables with a known number of rows."""
    # Kernels cannot read a shape on the host.
    for node in table.look_ups(rewriter):
        rows = (rewriter.dims(node.output[0]) or (None,))[0]
        if isinstance(rows, int):
            rewriter.drop(node)
            rewriter.add("TableGrad", node.input[1:], node.output, rows=rows)
