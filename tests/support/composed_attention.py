"""Attention as one node, and its gradient, by standard operators: the reference for a GPU's kernel.

`ortflow.workflow.graph.attention.find` documents what is computed. Queries of a group that share keys and values have
a separate axis here: [batch, heads of keys, group, tokens, size].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx
from onnx import TensorProto

from ortflow.workflow.graph.attention.find import MASKED
from ortflow.workflow.graph.autodiff.compose import compose
from ortflow.workflow.graph.autodiff.sizes import unified
from ortflow.workflow.graph.domains import CUDA_DOMAIN
from ortflow.workflow.graph.ir import shapes
from ortflow.workflow.graph.ir.edit import described
from ortflow.workflow.graph.ir.replacement import Replacement


def compose_attention(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of a model without Attention and AttentionGrad."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    # The number of heads, where an exporter let a Reshape find it.
    types = unified(copy.graph, {name: value.type for name, value in described(copy.graph).items()})
    for value in copy.graph.value_info:
        value.type.CopyFrom(types[value.name])
    return compose(copy, ATTENTION, CUDA_DOMAIN)


def attention(w: Replacement) -> None:
    """o and stats."""
    form = _Form(w, 0)
    q, k, v = form.operands
    scores = form.scores(q, k, w.input(form.behind))
    largest = w("ReduceMax", scores, w.ints(-1), keepdims=1)
    weights = w("Exp", w("Sub", scores, largest))
    total = w("ReduceSum", weights, w.ints(-1), keepdims=1)
    o = w("MatMul", w("Div", weights, total), v)
    stats = w("Reshape", w("Add", largest, w("Log", total)), w.ints(0, form.shared * form.group, -1, 1))
    w.done(form.joined(o), stats)


def attention_grad(w: Replacement) -> None:
    """ds k, ds^T q and p^T do, with p = exp(s - stats) and ds = p (do v^T - sum(do o)) scale."""
    form = _Form(w, 1)
    q, k, v = form.operands
    do, o = (form.split(w.input(place), form.shared, form.group, first=False) for place in (0, form.behind))
    stats = w("Reshape", w.input(form.behind + 1), w.ints(0, form.shared, form.group, -1, 1))
    p = w("Exp", w("Sub", form.scores(q, k, w.input(form.behind + 2)), stats))
    along = w("ReduceSum", w("Mul", do, o), w.ints(-1), keepdims=1)
    slope = w("Sub", w("MatMul", do, _turned(w, v)), along)
    ds = w("Mul", w("Mul", p, slope), w.constant(w.attribute("scale", 1.0)))
    made = [w("MatMul", ds, k)]
    for a, b in ((ds, q), (p, do)):
        made.append(w("ReduceSum", w("MatMul", _turned(w, a), b), w.ints(2), keepdims=1))
    w.done(*form.gathered(made))


class _Form:
    """The sizes of a node whose queries are its input `place`, and its operands by groups."""

    def __init__(self, w: Replacement, place: int) -> None:
        self._w = w
        self._packed = w.attribute("packed", [])
        self.heads_first = [bool(flag) for flag in w.attribute("heads_first", [0, 0, 0])]
        self.behind = place + (1 if self._packed else 3)
        """The place of the first input behind the operands."""
        if self._packed:
            heads, self.shared, self.size = self._packed
            values = self._unpacked(w.input(place))
        else:
            values = list(w.node.input[place : self.behind])
            heads, self.size = self._sizes(values[0], self.heads_first[0])
            self.shared, _ = self._sizes(values[1], self.heads_first[1])
        self.group = heads // self.shared
        groups = (self.group, 1, 1)
        self.operands = [
            self.split(name, self.shared, group, first=first)
            for name, group, first in zip(values, groups, self.heads_first, strict=True)
        ]

    def _unpacked(self, packed: str) -> list[str]:
        """Queries, keys and values as [batch, tokens, heads, size]."""
        w = self._w
        heads, shared, size = self._packed
        widths = w.ints(heads * size, shared * size, shared * size)
        parts = w.several("Split", 3, packed, widths, axis=-1)
        return [w("Reshape", part, w.ints(0, 0, -1, size)) for part in parts]

    def gathered(self, parts: Sequence[str]) -> list[str]:
        """Gradients of queries, keys and values as the node gives them."""
        w = self._w
        joined = [self.joined(part, first=first) for part, first in zip(parts, self.heads_first, strict=True)]
        if not self._packed:
            return joined
        return [w("Concat", *(w("Reshape", each, w.ints(0, 0, -1)) for each in joined), axis=-1)]

    def _sizes(self, value: str, first: bool) -> tuple[int, int]:
        """Number and size of the heads of a value."""
        dims = shapes.shape(self._w.context.types, value) or []
        heads = dims[1 if first else 2] if len(dims) == 4 else None
        if heads is None or dims[3] is None:
            raise self._w.refusal("the number or the size of its heads is not known")
        return heads, dims[3]

    def split(self, value: str, heads: int, group: int, *, first: bool) -> str:
        """A value as [batch, heads of keys, group, tokens, size]."""
        w = self._w
        if first:
            return w("Reshape", value, w.ints(0, heads, group, -1, self.size))
        return w("Transpose", w("Reshape", value, w.ints(0, 0, heads, group, self.size)), perm=[0, 2, 3, 1, 4])

    def joined(self, value: str, *, first: bool = False) -> str:
        """The inverse."""
        w = self._w
        if not first:
            return w("Reshape", w("Transpose", value, perm=[0, 3, 1, 2, 4]), w.ints(0, 0, -1, self.size))
        tokens = w("Shape", value, start=3, end=4)
        return w("Reshape", value, w("Concat", w.ints(0, -1), tokens, w.ints(self.size), axis=0))

    def scores(self, q: str, k: str, mask: str) -> str:
        """s, by groups."""
        w = self._w
        scores = w("Mul", w("MatMul", q, _turned(w, k)), w.constant(w.attribute("scale", 1.0)))
        if mask:
            if shapes.element_type(w.context.types, mask) == TensorProto.BOOL:
                added = w("Where", mask, w.constant(0.0), w.constant(MASKED))
            else:
                added = w("Max", mask, w.constant(MASKED))
            dims = shapes.shape(w.context.types, mask)
            heads = (1, 1) if dims is not None and dims[1] == 1 else (self.shared, self.group)
            shape = w("Concat", w.ints(0, *heads), w("Shape", added, start=2), axis=0)
            scores = w("Add", scores, w("Reshape", added, shape))
        if w.attribute("causal", 0):
            tokens, keys = (w("Squeeze", w("Shape", scores, start=at, end=at + 1)) for at in (3, 4))
            zero, one = w.constant(0, np.int64), w.constant(1, np.int64)
            rows, columns = (w("Range", zero, each, one) for each in (tokens, keys))
            later = w("Greater", columns, w("Unsqueeze", rows, w.ints(-1)))
            scores = w("Where", later, w.constant(-np.inf), scores)
        return scores


def _turned(w: Replacement, value: str) -> str:
    return w("Transpose", value, perm=[0, 1, 2, 4, 3])


ATTENTION: dict[str, Callable[[Replacement], None]] = {"Attention": attention, "AttentionGrad": attention_grad}
