"""Connectionist temporal classification: the loss of label sequences whose places in time are unknown.

Called by `loss`. Graves et al. 2006, equations 6 and 8, in logarithms, as torch.nn.CTCLoss. One Scan over time sums the
paths, so that neither the number of frames nor that of labels need be known; `ortflow.exporter.ctc` has the same
recursion for exports, unrolled.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.ir.edit import Editor, dims_of
from ortflow.workflow.graph.objective.labels import Dims, Labels, size, text
from ortflow.workflow.graph.objective.target import Names
from ortflow.workflow.spec.losses import Ctc

NEVER = -1e30
"""Logarithm of a probability of zero: an infinity has no gradient."""


def ctc_dims(graph: onnx.GraphProto, loss: Ctc, output: onnx.ValueInfoProto, batch: str, location: str) -> Dims:
    """The output's shape. Raises UserError unless it has three axes, with the samples where the loss expects them."""
    dims = dims_of(output)
    if dims is None or len(dims) != 3:
        raise UserError(
            f"output {output.name!r} has the shape {'unknown' if dims is None else text(dims)}, and ctc needs time,"
            " samples and classes",
            where=location,
            fix="name an output with three axes",
        )
    (first,) = (dims_of(value) for value in graph.input if value.name == batch)
    samples = first[0] if first else None
    expected = 0 if loss.batch_first else 1
    if isinstance(samples, str) and samples in dims and samples != dims[expected]:
        raise UserError(
            f"is {str(loss.batch_first).lower()}, and output {output.name!r} of shape {text(dims)} has the samples on"
            f" axis {dims.index(samples)}",
            where=f"{location}.batch_first",
            fix=f"set it to {str(not loss.batch_first).lower()}",
        )
    classes = dims[2]
    if isinstance(classes, int) and loss.blank >= classes:
        raise UserError(
            f"is {loss.blank}, and output {output.name!r} has {classes} classes",
            where=f"{location}.blank",
            fix=f"give a class from 0 to {classes - 1}",
        )
    return dims


def ctc(edit: Editor, labels: Labels, loss: Ctc, logits: str, dims: Dims, names: Names) -> None:
    """Add -log P(labels) / max(1, number of labels), summed over the samples, and the number of samples.

    P is the probability of all ways to place the labels in the frames of a sample. A sample whose labels do not fit in
    its frames has the loss infinity, or 0 with `zero_infinity`; one with a label or a length out of range has NaN.
    """
    samples = dims[0 if loss.batch_first else 1]
    label = labels.input(loss.label, TensorProto.INT64, (samples, "ortflow.labels"), f"{names.where}.label")
    frames = edit("Transpose", logits, perm=[1, 0, 2]) if loss.batch_first else logits
    frames = edit("LogSoftmax", frames, axis=2)
    time, longest, classes = size(edit, frames, 0), size(edit, label, 1), size(edit, frames, 2)
    zero, one = edit.constant(0, "int64"), edit.constant(1, "int64")

    def lengths(name: str | None, otherwise: str, key: str) -> str:
        """Int64 [samples, 1]."""
        if name is None:
            return otherwise
        lengths = labels.input(name, TensorProto.INT64, (samples,), f"{names.where}.{key}")
        return edit("Reshape", lengths, edit.ints(-1, 1))

    counted = edit("ReduceSum", edit.cast(edit("Not", edit("Less", label, zero)), TensorProto.INT64), edit.ints(1))
    everywhere = edit("Expand", time, edit("Shape", counted))
    inputs = lengths(loss.input_lengths, everywhere, "input_lengths")
    targets = lengths(loss.target_lengths, counted, "target_lengths")

    places = edit("Unsqueeze", edit("Range", zero, longest, one), edit.ints(0))
    is_label = edit("Less", places, targets)
    in_range = edit("And", edit("Not", edit("Less", label, zero)), edit("Less", label, classes))
    # As numbers: ReduceMax reduces Booleans only from opset 20 on.
    wrong = edit("ReduceMax", edit.cast(edit("And", is_label, edit("Not", in_range))), edit.ints(1), keepdims=1)
    outside = [edit("Less", targets, zero), edit("Less", longest, targets), edit("Less", inputs, zero)]
    outside.append(edit("Less", time, inputs))
    for condition in outside:
        wrong = edit("Max", wrong, edit.cast(condition))

    path, skips = _path(
        edit, edit("Where", edit("And", is_label, in_range), label, edit.constant(loss.blank, "int64")), loss
    )
    shape = edit("Concat", edit("Shape", frames, end=1), edit("Shape", path), axis=0)
    # GatherElements does not broadcast.
    index = edit("Expand", edit("Unsqueeze", path, edit.ints(0)), shape)
    emitted = edit("GatherElements", frames, index, axis=2)
    steps = edit("Reshape", edit("Range", zero, time, one), edit.ints(-1, 1, 1))
    live = edit("Less", steps, edit("Unsqueeze", inputs, edit.ints(0)))
    start = edit("Range", zero, size(edit, path, 1), one)
    start = edit("Where", edit("Equal", start, zero), edit.constant(0.0), edit.constant(NEVER))
    start = edit("Expand", edit("Unsqueeze", start, edit.ints(0)), edit("Shape", path))
    final = edit("Scan", start, emitted, live, body=_step(edit, skips), num_scan_inputs=2)

    # The last label, or the blank behind it. Places of wrong lengths are of no consequence, but must exist.
    last = edit("Mul", edit("Min", edit("Max", targets, zero), longest), edit.constant(2, "int64"))
    at_blank = edit("GatherElements", final, last, axis=1)
    at_label = edit("GatherElements", final, edit("Max", edit("Sub", last, one), zero), axis=1)
    at_label = edit("Where", edit("Greater", targets, zero), at_label, edit.constant(NEVER))
    ends = edit("Concat", at_blank, at_label, axis=1)
    condition = edit("Neg", edit("ReduceLogSumExp", ends, edit.ints(1), keepdims=0))
    possible = edit("Less", condition, edit.constant(-NEVER / 2))
    condition = edit("Where", possible, condition, edit.constant(0.0 if loss.zero_infinity else np.inf))
    divisor = edit("Squeeze", edit.cast(edit("Max", targets, one)), edit.ints(1))
    condition = edit("Div", condition, divisor)
    is_wrong = edit("Greater", edit("Squeeze", wrong, edit.ints(1)), edit.constant(0.0))
    condition = edit("Where", is_wrong, edit.constant(np.nan), condition)
    if labels.padded:
        condition = edit("Where", labels.valid_rows(condition, 1), condition, edit.constant(0.0))
    edit.total(condition, names.total)
    labels.count(condition, names.weight)


def _path(edit: Editor, label: str, loss: Ctc) -> tuple[str, str]:
    """The labels with blanks before, between and behind, int64 [samples, places], and where two places may be skipped.

    That is fp32 of the same shape: 0 if the place may be reached from the second before it, else `NEVER`.
    """
    blank = edit.constant(loss.blank, "int64")
    between = edit("Expand", blank, edit("Shape", label))
    pairs = edit(
        "Concat", *(edit("Unsqueeze", labels_of_pair, edit.ints(2)) for labels_of_pair in (between, label)), axis=2
    )
    flat = edit("Reshape", pairs, edit.constant([0, -1], "int64"))
    path = edit("Pad", flat, edit.ints(0, 0, 0, 1), blank)
    # ONNX's way to say "to the end": an end behind the last element is clamped.
    later = edit("Slice", path, edit.ints(2), edit.ints(2**31), edit.ints(1))
    earlier = edit("Slice", path, edit.ints(0), edit.ints(-2), edit.ints(1))
    never = edit.constant(NEVER)
    # Two equal labels need the blank between them: without, they are one label. Two blanks have a label between them.
    allowed = edit("Where", edit("Equal", later, earlier), never, edit.constant(0.0))
    return path, edit("Pad", allowed, edit.ints(0, 2, 0, 0), never)


def _step(outer: Editor, skips: str) -> onnx.GraphProto:
    """One frame: the logarithm of the probability of all paths to each place, [samples, places].

    Constants are captured from the outer graph, and all names differ from its own.
    """

    def value(name: str, kind: int, places: int | None = None) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, kind, [None, places])

    names = {noun: outer.fresh(f"ctc_{noun}") for noun in ("before", "emitted", "live", "after")}
    inputs = [value(names["before"], TensorProto.FLOAT), value(names["emitted"], TensorProto.FLOAT)]
    inputs.append(value(names["live"], TensorProto.BOOL, 1))
    graph = helper.make_graph([], "ctc", inputs, [value(names["after"], TensorProto.FLOAT)])
    edit, ints = Editor(graph), outer.ints

    def add(operator: str, *inputs: str, output: str | None = None, **attributes: Any) -> str:
        return edit(operator, *inputs, output=output or outer.fresh(f"ctc_{operator}"), **attributes)

    padded = add("Pad", names["before"], ints(0, 2, 0, 0), outer.constant(NEVER))
    one_back = add("Slice", padded, ints(1), ints(-1), ints(1))
    two_back = add("Add", add("Slice", padded, ints(0), ints(-2), ints(1)), skips)
    sides = [add("Unsqueeze", scores, ints(2)) for scores in (names["before"], one_back, two_back)]
    reached = add("ReduceLogSumExp", add("Concat", *sides, axis=2), ints(2), keepdims=0)
    add("Where", names["live"], add("Add", reached, names["emitted"]), names["before"], output=names["after"])
    return graph
