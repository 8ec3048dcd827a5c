"""Recognises attention in the operators that exporters write, and replaces it by one node of `ortflow.cuda`.

Called by `assembly` on the forward graph of a half-precision run, before it is differentiated. `Attention` computes
`o` and `stats` from q, k, v and a mask:

    s = scale q k^T + mask        o = softmax(s) v        stats = log(sum(exp(s)))

q, k, v and o are [batch, tokens, heads, size]; stats is fp32 [batch, heads, tokens, 1]. `heads_first` has one flag each
for q, k and v: the value, and its gradient, are [batch, heads, tokens, size] instead. k and v may have fewer heads;
each is then shared by a group of consecutive query heads. The mask is optional and broadcast to s. It is either numeric
and added, or Boolean and true where a query attends to a key. Numbers below MASKED are treated as MASKED. With
`causal`, no query attends to a later key.

With `dropout` > 0, the weights softmax(s) are dropped with that probability, and the others multiplied by
1 / (1 - dropout). Behind the mask, whose place is kept if there is none, follow a seed and an offset, int64 [1]: cuDNN
draws a mask from them, in both passes the same. Stats are those before the dropout.

With `packed` = (query heads, key and value heads, head size), one value [batch, tokens, width] replaces q, k and v:
each
token holds its queries, then its keys, then its values. It has one gradient. `fusion.packed` creates such nodes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ortflow.workflow.graph.attention.masks import Mask, Masks
from ortflow.workflow.graph.attention.operands import Operand, Size, Unfused, View, operand
from ortflow.workflow.graph.attention.pattern import BY_TOKENS, Guard, Scores, result_of, scores_of, weights_of
from ortflow.workflow.graph.autodiff.path import gradient_path
from ortflow.workflow.graph.autodiff.sizes import unified
from ortflow.workflow.graph.domains import CUDA_DOMAIN
from ortflow.workflow.graph.ir import shapes, walk
from ortflow.workflow.graph.ir.edit import Editor, replace
from ortflow.workflow.graph.ir.order import prune, sort_nodes
from ortflow.workflow.graph.ir.origin import inherit
from ortflow.workflow.graph.ir.replacement import attribute
from ortflow.workflow.graph.types import SEED

OPERATOR = "Attention"
GRADIENT = "AttentionGrad"
MASKED = -3e4
"""Added to the score of a masked key. It is representable in fp16, and its exponential is 0."""
_APART = 0x9E3779B97F4A7C15
"""Between the seeds of two dropouts: the golden ratio of 2^64, so that no multiples of it are close."""
LARGEST_HEAD = 128
"""Largest head size for which cuDNN has the gradient on every GPU."""


def attend(model: onnx.ModelProto, trained: Collection[str] | None = None) -> tuple[onnx.ModelProto, list[str]]:
    """Insert Attention nodes in a copy of a forward graph.

    Parameters
    ----------
    model
        The forward graph.
    trained
        Names of the trained parameters. If None, every floating-point input of fixed shape is treated as one.

    Returns
    -------
    ModelProto
        The copy.
    list of str
        For each attention that is not fused, a note that says why.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    softmaxes = [node for node in graph.node if node.op_type == "Softmax" and not node.domain]
    if not softmaxes:
        return copy, []
    view = View(copy, unified(graph, shapes.value_types(copy)))
    path = gradient_path(graph, view.types, _parameters(graph) if trained is None else trained, view.outputs)
    writer = _Writer(view, Masks(view, path.values))
    notes = []
    for softmax in softmaxes:
        try:
            writer.fuse(softmax)
        except Unfused as why:
            notes.append(f"the attention of {walk.called(softmax)} is not fused: {why}")
    writer.finish()
    return copy, notes


def drops_weights(node: onnx.NodeProto) -> bool:
    """Whether a node is an attention with dropout, whose masks only cuDNN draws."""
    return bool(node.domain == CUDA_DOMAIN and node.op_type == OPERATOR and attribute(node, "dropout", 0.0) > 0)


def _parameters(graph: onnx.GraphProto) -> list[str]:
    described = {value.name: value.type for value in graph.input}
    shape_of = {name: shapes.shape(described, name) for name in described}
    return [
        name for name, dims in shape_of.items()
        if dims is not None and None not in dims and shapes.element_type(described, name) == TensorProto.FLOAT
    ]  # fmt: skip


class _Writer:
    """Inserts nodes into the graph of a view. Skips a softmax that is not part of attention."""

    def __init__(self, view: View, masks: Masks) -> None:
        self._view, self._masks = view, masks
        self._graph = view.model.graph
        self._edit = Editor(self._graph)
        self._made: dict[tuple[object, ...], str] = {}
        self._known: list[onnx.ValueInfoProto] = []

    def fuse(self, softmax: onnx.NodeProto) -> None:
        """Replace the nodes around a softmax by an Attention node. Raises Unfused if this form is not supported."""
        view = self._view
        dims = shapes.named_shape(view.types, softmax.input[0])
        scores = scores_of(view, softmax.input[0])
        if scores is None or dims is None or attribute(softmax, "axis", -1) not in (-1, len(dims) - 1):
            return
        weights = weights_of(view, softmax.output[0])
        if weights is None:
            return
        product, guards = weights.product, weights.guards
        if len(dims) != 4:
            raise Unfused(f"its scores have {len(dims)} axes")
        if dims[2] == dims[3] == 1:
            raise Unfused("it is of a single token")
        if any(a == 1 != b for a, b in zip(view.dims(scores.product.output[0]), dims, strict=False)):
            raise Unfused("its mask is larger than its scores")
        q = operand(view, scores.product.input[0], "bhtd", grouped=False)
        for grouped in (True, False):
            k = operand(view, scores.product.input[1], "bhdt", grouped=grouped)
            v = operand(view, product.input[1], "bhtd", grouped=grouped)
            if k.repeat == v.repeat:
                break
        size, heads = self._check(q, k, v)
        mask = self._masks.of(scores.added, scores.conditions, (str(dims[2]), str(dims[3])))
        result = result_of(view, product.output[0], guards)
        before = len(self._graph.node)
        heads_first = [factor.axes == ("b", "h", "t", "d") for factor in (q, k, v)]
        names = [
            factor.value if first else self._by_tokens(factor)
            for factor, first in zip((q, k, v), heads_first, strict=True)
        ]
        fed = self._mask(mask)
        drawn, flags = self._drawn(weights.dropout)
        o, stats = self._edit.fresh("attention"), self._edit.fresh("attention_stats")
        scale = scores.scale * q.scale * k.scale
        node = helper.make_node(
            OPERATOR, [*names, *([fed] if fed or drawn else []), *drawn], [o, stats], f"{softmax.name or o}/{OPERATOR}",
            domain=CUDA_DOMAIN, scale=float(scale), causal=int(mask.causal),
            heads_first=[int(first) for first in heads_first], **flags,
        )  # fmt: skip
        self._graph.node.append(node)
        batch, tokens = self._view.dims(q.value)[q.axes.index("b")], dims[2]
        self._describe(o, [batch, tokens, heads, size])
        self._describe(stats, [batch, heads, tokens, 1])
        if v.scale != 1:
            o = self._edit("Mul", o, self._edit.constant(v.scale))
        o = self._guarded(o, result.guards, mask, scores)
        if not result.by_tokens:
            o = self._edit("Transpose", o, perm=BY_TOKENS)
        self._stand_in(o, result.value, before)
        inherit(self._graph.node[before:], softmax)

    def _drawn(self, dropout: tuple[int, float] | None) -> tuple[list[str], dict[str, float]]:
        """Seed and offset of a dropout of this number and ratio, and its attribute; nothing if there is none."""
        if dropout is None or dropout[1] == 0:
            return [], {}
        number, ratio = dropout
        if all(value.name != SEED for value in self._graph.input):
            self._graph.input.append(helper.make_tensor_value_info(SEED, TensorProto.INT64, [1]))
        apart = (number + 1) * _APART % 2**64
        key = self._edit.constant([apart - 2**64 if apart >= 2**63 else apart], "int64")
        # Not shared with shapes and axes, which lie in the host's memory.
        offset = self._edit.fresh("offset")
        self._graph.initializer.append(numpy_helper.from_array(np.zeros(1, np.int64), offset))
        return [self._edit("Add", SEED, key), offset], {"dropout": ratio}

    def _check(self, q: Operand, k: Operand, v: Operand) -> tuple[int, int]:
        """Return the head size and the number of query heads. Raises Unfused if cuDNN does not support them."""
        dims = []
        for factor in (q, k, v):
            sizes = self._view.dims(factor.value)
            dims.append({axis: sizes[place] for place, axis in enumerate(factor.axes)})
        size, heads = dims[0]["d"], dims[0]["h"]
        if not isinstance(size, int) or not isinstance(heads, int):
            raise Unfused("the number or the size of its heads varies")
        if any(axis_sizes["d"] != size for axis_sizes in dims):
            raise Unfused("its keys and values differ in size")
        if size % 8 or size > LARGEST_HEAD:
            raise Unfused(f"its heads have the size {size}: up to {LARGEST_HEAD}, a multiple of 8 can be fused")
        served = {(part["h"], factor.repeat) for part, factor in zip(dims[1:], (k, v), strict=True)}
        if served != {(heads // k.repeat, k.repeat)} or heads % k.repeat:
            raise Unfused("keys and values have different numbers of heads, or numbers that do not divide the queries'")
        # Two unknown sizes are assumed equal: a broadcast axis has size 1.
        batches = {part["b"] for part in dims}
        if any(isinstance(batch, int) for batch in batches) and len(batches) > 1:
            raise Unfused("the batch may differ between queries, keys and values")
        return size, heads

    def _by_tokens(self, factor: Operand) -> str:
        """The operand as [batch, tokens, heads, size], without its scale."""
        order = [factor.axes.index(axis) for axis in "bthd"]
        if order == [0, 1, 2, 3]:
            return factor.value
        key = "turned", factor.value, tuple(order)
        if key not in self._made:
            self._made[key] = self._edit("Transpose", factor.value, perm=order)
        return self._made[key]

    def _mask(self, mask: Mask) -> str:
        """The value that combines a mask's conditions and numbers; empty if there are none."""
        if mask.is_certain:
            return ""
        key = "mask", tuple(mask.conditions), tuple(mask.added)
        if key in self._made:
            return self._made[key]
        total = ""
        for name in mask.added:
            name = self._of_four_axes(name)
            total = self._edit("Add", total, name) if total else name
        allowed = ""
        for condition in mask.conditions:
            name = self._of_four_axes(condition.value)
            name = self._edit("Not", name) if condition.negated else name
            allowed = self._edit("And", allowed, name) if allowed else name
        if total and allowed:
            total = self._edit("Where", allowed, total, self._edit.constant(MASKED))
        self._made[key] = total or allowed
        return self._made[key]

    def _of_four_axes(self, name: str) -> str:
        missing = 4 - len(self._view.dims(name))
        if not missing:
            return name
        key = "axes", name
        if key not in self._made:
            self._made[key] = self._edit("Unsqueeze", name, self._edit.ints(*range(missing)))
        return self._made[key]

    def _guarded(self, o: str, guards: Sequence[Guard], mask: Mask, scores: Scores) -> str:
        """`o`, with the rows set to 0 that belong to queries without a key to attend to, if there can be any."""
        for guard in guards:
            if mask.is_certain if not guard.value else self._keeps_all(guard):
                continue
            if guard.node.op_type == "Mul":
                o = self._edit("Mul", o, self._rows(self._of_four_axes(guard.value)))
                continue
            value = self._of_four_axes(guard.value) if guard.value else self._blind(scores)
            if not value:
                continue
            zero = self._edit.constant(0.0)
            parts = [zero, o] if guard.place == 2 else [o, zero]
            o = self._edit("Where", self._rows(value), *parts)
        return o

    def _keeps_all(self, guard: Guard) -> bool:
        """Whether a guard changes nothing, for any batch."""
        proof = self._view.proof
        arrays = proof.values(guard.value) if proof.is_constant(guard.value) else []
        neutral = 1 if guard.node.op_type == "Mul" else guard.place == 1
        return bool(arrays) and all(bool((array == neutral).all()) for array in arrays)

    def _blind(self, scores: Scores) -> str:
        """For each query, whether all keys are masked, so that its weights are NaN. Empty if that cannot happen."""
        view = self._view
        condition, fill = scores.conditions[0].value if scores.conditions else "", scores.fill
        if len(scores.conditions) + len(scores.added) > 1 or (scores.conditions and scores.conditions[0].negated):
            raise Unfused("its weights may be NaN, for several reasons")
        if scores.added:
            name = scores.added[0]
            while (node := view.maker(name)) is not None and (view.alias(node) or node.op_type == "Expand"):
                name = node.input[0]
            if node is None or node.op_type != "Where" or view.proof.number(node.input[1]) != 0:
                raise Unfused("its weights may be NaN, and its mask is not a condition")
            condition, fill = node.input[0], view.proof.number(node.input[2])
        if fill != -math.inf:
            return ""
        key = "blind", condition
        if key not in self._made:
            # ReduceMax reduces Booleans only from opset 20 on.
            numbers = self._edit.cast(self._of_four_axes(condition), TensorProto.INT32)
            any_key = self._edit("ReduceMax", numbers, self._edit.ints(-1), keepdims=1)
            self._made[key] = self._edit("Not", self._edit.cast(any_key, TensorProto.BOOL))
        return self._made[key]

    def _rows(self, name: str) -> str:
        """A value per query, as [batch, heads, tokens, 1], in the layout [batch, tokens, heads, size]."""
        key = "rows", name
        if key not in self._made:
            self._made[key] = self._edit("Transpose", name, perm=BY_TOKENS)
        return self._made[key]

    def _stand_in(self, new: str, old: str, place: int) -> None:
        """Rename `new`, made by the nodes from `place` on, to `old`."""
        unused = self._edit.fresh("replaced")
        maker = self._view.makers.pop(old)
        maker.output[:] = [unused if name == old else name for name in maker.output]
        for node in self._graph.node[place:]:
            node.input[:] = [old if name == new else name for name in node.input]
            node.output[:] = [old if name == new else name for name in node.output]
        for value in self._known:
            value.name = old if value.name == new else value.name

    def _describe(self, name: str, dims: Sequence[Size]) -> None:
        self._known.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, list(dims)))

    def finish(self) -> None:
        """Remove the nodes that the new ones replace."""
        if not self._known:
            return
        graph = self._graph
        names = {value.name for value in self._known}
        replace(graph.value_info, [*(value for value in graph.value_info if value.name not in names), *self._known])
        sort_nodes(graph)
        prune(graph)
        if not any(opset.domain == CUDA_DOMAIN for opset in self._view.model.opset_import):
            self._view.model.opset_import.append(helper.make_opsetid(CUDA_DOMAIN, 1))
        shapes.infer(self._view.model)
