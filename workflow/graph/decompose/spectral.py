"""Writes the inverse of a one-sided Fourier transform with operators that ONNX Runtime has.

PyTorch's exporter writes `irfft` as a DFT that is both inverse and one-sided. ONNX has forbidden that up to opset 20,
and ONNX Runtime refuses it.
"""

from __future__ import annotations

import contextlib

import numpy as np
import onnx

from ortflow.workflow.graph.ir import shapes
from ortflow.workflow.graph.ir.edit import replace
from ortflow.workflow.graph.ir.replacement import MISFITS, Context, Replacement, attribute, context_of

LONGEST = 2**24
"""Frequencies of a spectrum that is rewritten: the file holds a number for each."""


def replace_inverse_halves(model: onnx.ModelProto) -> list[str]:
    """Rewrite each such DFT of the main graph, in place; returns log lines. One of unknown sizes stays, for ONNX
    Runtime to refuse.
    """
    if not any(_is_inverse_half(node) for node in model.graph.node):
        return []
    context, nodes, count = context_of(model), list[onnx.NodeProto](), 0
    for node in model.graph.node:
        replacement = None
        if _is_inverse_half(node):
            with contextlib.suppress(*MISFITS):
                replacement = _whole(node, context)
        nodes += [node] if replacement is None else replacement
        count += replacement is not None
    replace(model.graph.node, nodes)
    return [f"{count} inverse one-sided DFT written as two-sided"] if count else []


def _is_inverse_half(node: onnx.NodeProto) -> bool:
    if node.op_type != "DFT" or node.domain != "":
        return False
    return all(attribute(node, name, 0) for name in ("inverse", "onesided"))


def _whole(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto] | None:
    """The N real numbers x with the one-sided spectrum X: with w = 1 for frequencies 0 and N/2, and 2 for the others,

    x[n] = sum over k <= N/2 of Re(w[k] X[k] exp(2 pi i k n / N)) / N,

    because X[N - k] is the conjugate of X[k]. The other elements of the two-sided spectrum are zeros.
    """
    w = Replacement(node, context)
    dims, length = shapes.shape(context.types, w.input(0)) or [], w.value(1)
    axis = int(w.attribute("axis", 1)) % len(dims)
    bins = dims[axis]
    if bins is None or (w.input(1) and length is None):
        return None
    size = 2 * (bins - 1) if length is None else int(length.reshape(-1)[0])
    count = min(size // 2 + 1, bins)
    if not 0 < count <= LONGEST:
        return None
    # The spectrum has the frequencies 0 and N/2 once, and all others twice.
    weights = np.array([1 if 2 * k in (0, size) else 2 for k in range(count)], np.float32)
    shape = [-1, *[1] * (len(dims) - 1 - axis)]
    spectrum = w("Slice", w.input(0), w.ints(0), w.ints(count), w.ints(axis)) if count < bins else w.input(0)
    weighted = w("Mul", spectrum, w.constant(weights.reshape(shape)))
    signal = w("DFT", weighted, w.constant(size, np.int64), axis=axis, inverse=1)
    return w.done(w("Slice", signal, w.ints(0), w.ints(1), w.ints(-1)))
