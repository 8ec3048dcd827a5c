"""Convolutions in groups over one axis or over three, as convolutions over two.

Called by `repair`. ONNX Runtime 1.19.2's ConvGrad walks over the data one group at a time, and where the kernel has not
two axes it clears the memory of all groups each time: what lies behind the data's gradient is lost, and which tensor
that is depends on where memory was free. With two axes, or one group, it is right.
"""

from __future__ import annotations

from typing import Any

import onnx

from ortflow.workflow.graph.decompose_images import explicit_pads
from ortflow.workflow.graph.writer import LAST, Context, Writer


def convolution(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto] | None:
    """Conv with pads in numbers and, in groups, over two axes; None where it is so already."""
    explicit = explicit_pads(node, context)
    current = explicit[0] if explicit else node
    w = Writer(current, context)
    axes = w.rank(0) - 2
    if axes == 2 or w.attribute("group", 1) == 1:
        return explicit
    attributes = _Attributes(w, axes)
    value = _lengthwise(w, attributes) if axes == 1 else _slice_by_slice(w, attributes)
    return w.done(value)


class _Attributes:
    """Strides, dilations and pads of each axis, defaults filled in."""

    def __init__(self, w: Writer, axes: int) -> None:
        self.strides: list[int] = w.attribute("strides", None) or [1] * axes
        self.dilations: list[int] = w.attribute("dilations", None) or [1] * axes
        pads = w.attribute("pads", None) or [0] * (2 * axes)
        self.begins, self.ends = pads[:axes], pads[axes:]

    def from_axis(self, first: int) -> dict[str, Any]:
        """The attributes of a Conv over the axes from `first` on."""
        pads = [*self.begins[first:], *self.ends[first:]]
        return {"strides": self.strides[first:], "dilations": self.dilations[first:], "pads": pads}


def _conv(w: Writer, x: str, weight: str, bias: list[str], **attributes: Any) -> str:
    return w("Conv", x, weight, *bias, group=w.attribute("group", 1), **attributes)


def _lengthwise(w: Writer, a: _Attributes) -> str:
    """One axis: images of one row."""
    row = w.ints(2)
    x, weight = w("Unsqueeze", w.input(0), row), w("Unsqueeze", w.input(1), row)
    pads = [0, a.begins[0], 0, a.ends[0]]
    y = _conv(w, x, weight, _bias(w), strides=[1, *a.strides], dilations=[1, *a.dilations], pads=pads)
    return w("Squeeze", y, row)


def _slice_by_slice(w: Writer, a: _Attributes) -> str:
    """Three axes and more: for each place along the kernel's first axis, a convolution over the others of the slices
    that it meets, which stand in the batch; summed. Four axes come down to three this way, and those to two."""
    rank, places = w.rank(0), w.shape(1)[2]
    if places is None:
        raise w.refusal("the shape of its weight is not known")
    pads = [0] * (2 * rank)
    pads[2], pads[rank + 2] = a.begins[0], a.ends[0]
    x = w("Pad", w.input(0), w.ints(*pads)) if a.begins[0] or a.ends[0] else w.input(0)
    # [N, C, D, ...] as [N, D, C, ...]
    order = [0, 2, 1, *range(3, rank)]
    x = w("Transpose", x, perm=order)
    weights = w.several("Split", places, w.input(1), axis=2, num_outputs=places)
    reach = a.dilations[0] * (places - 1)
    total, count = "", ""
    for place in range(places):
        start = place * a.dilations[0]
        end = start - reach or LAST
        met = w("Slice", x, w.ints(start), w.ints(end), w.ints(1), w.ints(a.strides[0]))
        # [N, D', C, ...], whose first two axes become the batch.
        count = count or w("Shape", met, start=0, end=2)
        flat = w("Reshape", met, w("Concat", w.ints(-1), w("Shape", met, start=2), axis=0))
        weight = w("Squeeze", weights[place], w.ints(2))
        part = _conv(w, flat, weight, [] if total else _bias(w), **a.from_axis(1))
        total = w("Add", total, part) if total else part
    y = w("Reshape", total, w("Concat", count, w("Shape", total, start=1), axis=0))
    return w("Transpose", y, perm=order)


def _bias(w: Writer) -> list[str]:
    return [w.input(2)] if w.input(2) else []
