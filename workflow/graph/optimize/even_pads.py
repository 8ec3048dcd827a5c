"""Rewrites ConvTranspose so that the padding at both ends of an axis is equal.

The CUDA provider supports no other; ONNX Runtime would run the node on the CPU. The gradient of a convolution with
stride 2 over an image of even size is such a node.
"""

from __future__ import annotations

import onnx

from ortflow.workflow.graph.ir.replacement import LAST, Replacement, attribute, set_attribute

SPATIAL = 2
"""The first spatial axis."""


def pads_unevenly(node: onnx.NodeProto) -> bool:
    """Whether a node is a ConvTranspose whose pads at the two ends of an axis differ."""
    if node.domain or node.op_type != "ConvTranspose" or attribute(node, "output_shape", None):
        return False
    begins, ends = _halves(attribute(node, "pads", []))
    return attribute(node, "auto_pad", "NOTSET") == "NOTSET" and begins != ends


def pad_evenly(w: Replacement) -> None:
    """The same result with equal pads: by `output_padding` if possible, otherwise by cropping a larger result.

    Along an axis, the result has (count - 1) * stride + reach + output_padding - begin - end elements, so increasing
    `end` and `output_padding` by the same number changes nothing.
    """
    begins, ends = _halves(w.attribute("pads", []))
    ones = [1] * len(begins)
    strides, extra = w.attribute("strides", ones), list(w.attribute("output_padding", [0 for _ in begins]))
    even, starts, stops = [], [], []
    for axis, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        reaches = begin > end and extra[axis] + begin - end < strides[axis]
        extra[axis] += begin - end if reaches else 0
        pad = begin if reaches else min(begin, end)
        even.append(pad)
        starts.append(begin - pad)
        stops.append(LAST if reaches or end == pad else pad - end)
    node = onnx.NodeProto()
    node.CopyFrom(w.node)
    set_attribute(node, "pads", even * 2)
    set_attribute(node, "output_padding", extra if any(extra) else None)
    if all(stop == LAST for stop in stops) and not any(starts):
        w.nodes.append(node)
        return
    node.output[0] = w.fresh("whole")
    w.nodes.append(node)
    axes = range(SPATIAL, SPATIAL + len(even))
    w.done(w("Slice", node.output[0], w.ints(*starts), w.ints(*stops), w.ints(*axes)))


def _halves(pads: list[int]) -> tuple[list[int], list[int]]:
    """Pads before and after each axis."""
    half = len(pads) // 2
    return list(pads[:half]), list(pads[half:])
