"""Resize as a product of the input with one interpolation matrix per resized axis.

`by_axes` is called by `fold` for every graph, `resize` by `expand` for training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ortflow.workflow.graph.ir import shapes
from ortflow.workflow.graph.ir.known import Known
from ortflow.workflow.graph.ir.replacement import Context, Replacement, attribute, copy_of, set_attribute
from ortflow.workflow.graph.ir.writer import Fresh

LARGEST = 1 << 24
"""Largest interpolation matrix, in elements: 64 MiB, 4,096 by 4,096 pixels."""
_SCALES, _SIZES = 2, 3


def by_axes(
    node: onnx.NodeProto, constants: Known, types: Mapping[str, onnx.TypeProto], fresh: Fresh
) -> list[onnx.NodeProto] | None:
    """Rewrite a Resize that lists all axes to list only those whose size changes; None if it can stay.

    Exporters copy batch and channels from the input's shape, which is unknown until there is a batch:
    `Concat(Shape(x)[:2], sizes)`.
    """
    if node.op_type != "Resize" or node.domain != "" or attribute(node, "axes", None) is not None:
        return None
    rank = shapes.rank(types, node.input[0])
    if rank is None or _crops(node) or attribute(node, "keep_aspect_ratio_policy", "stretch") != "stretch":
        return None
    place = _place(node)
    amounts = constants.value(node.input[place])
    if amounts is None or amounts.dtype != object or amounts.shape != (rank,):
        return None
    unchanged = [1 if place == _SCALES else constants.axis(node.input[0], axis) for axis in range(rank)]
    axes = [axis for axis in range(rank) if amounts[axis] != unchanged[axis]]
    if not axes:
        return [helper.make_node("Identity", node.input[:1], node.output, node.name)]
    if len(axes) == rank:
        return None
    changed = fresh(f"{node.output[0]}.amounts")
    changed_amounts = amounts[axes]
    if any(isinstance(amount, str) for amount in changed_amounts):
        index = fresh(f"{node.output[0]}.axes")
        before = [_constant(index, axes), helper.make_node("Gather", [node.input[place], index], [changed])]
    else:
        before = [_constant(changed, changed_amounts.astype(np.float32 if place == _SCALES else np.int64))]
    copy = copy_of(node)
    copy.input[place] = changed
    set_attribute(copy, "axes", axes)
    return [*before, copy]


def _constant(name: str, values: Any) -> onnx.NodeProto:
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.array(values)))


def _crops(node: onnx.NodeProto) -> bool:
    return bool(attribute(node, "coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize")


def _place(node: onnx.NodeProto) -> int:
    """Position of the input with the result's size."""
    return _SIZES if len(node.input) > _SIZES and node.input[_SIZES] else _SCALES


def resize(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto]:
    """Resize as a product with an interpolation matrix along each axis that changes.

    Every mode is linear and separable by axis. If sizes are known, the matrix is ONNX Runtime's own Resize of the unit
    vectors, so the forward pass is unchanged; otherwise nodes compute it.
    """
    w = Replacement(node, context)
    if _crops(node):
        raise w.refusal("it crops")
    if w.attribute("keep_aspect_ratio_policy", "stretch") != "stretch":
        raise w.refusal("it keeps the aspect ratio")
    shape = w.shape(0)
    rank = len(shape)
    axes = [int(a) % rank for a in w.attribute("axes", list(range(rank)))]
    place = _place(node)
    amounts: Sequence[Any] = [None] * len(axes) if w.value(place) is None else list(w.known_value(place, "sizes"))
    value = w.input(0)
    for i, (axis, amount) in enumerate(zip(axes, amounts, strict=True)):
        size = shape[axis]
        if amount is not None and amount == (1 if place == _SCALES else size):
            continue
        if amount is None or size is None:
            value = along(w, value, axis, rank, _computed(w, value, axis, place, i))
        else:
            value = along(w, value, axis, rank, _interpolation(node, size, place, amount))
    return w.done(value)


def _interpolation(node: onnx.NodeProto, size: int, place: int, amount: Any) -> np.ndarray:
    """[size, new size]: the Resize of the unit vectors along one axis."""
    grown = size * amount if place == _SCALES else amount
    if not 0 < size * grown <= LARGEST:
        raise Replacement(node, Context(str, {})).refusal(f"it would need a matrix of {size} by {grown:.0f}")
    template = copy_of(node)
    template.input[:] = ["x", "", "amounts"] if place == _SCALES else ["x", "", "", "amounts"]
    set_attribute(template, "axes", None)
    dtype = np.float32 if place == _SCALES else np.int64
    amounts = np.array([1, 1, 1, amount] if place == _SCALES else [1, 1, size, amount], dtype)
    return of_unit_vectors(template, size, onnx.numpy_helper.from_array(amounts, "amounts"))


def of_unit_vectors(template: onnx.NodeProto, size: int, *constants: onnx.TensorProto) -> np.ndarray:
    """[size, new size]: the result of ONNX Runtime's own kernel for a node whose input x is the unit vectors."""
    from ortflow.workflow.onnx_runtime import onnxruntime

    template.output[:] = ["y"]
    graph = helper.make_graph(
        [template],
        "alone",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 1, size, size])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        initializer=constants,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    units = np.eye(size, dtype=np.float32).reshape(1, 1, size, size)
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return np.asarray(session.run(["y"], {"x": units})[0]).reshape(size, -1)
    except Exception as error:  # noqa: BLE001 - ONNX Runtime's errors have no common base class
        raise ValueError(str(error)) from None


def along(w: Replacement, value: str, axis: int, rank: int, matrix: np.ndarray | str) -> str:
    """Product with a matrix [size, new size], an array or the value of a node, along one axis."""
    if axis == rank - 2:
        if isinstance(matrix, str):
            return w("MatMul", w("Transpose", matrix, perm=[1, 0]), value)
        return w("MatMul", w.constant(np.ascontiguousarray(matrix.T)), value)
    right = matrix if isinstance(matrix, str) else w.constant(matrix)
    if axis == rank - 1:
        return w("MatMul", value, right)
    order = list(range(rank))
    order[axis], order[-1] = order[-1], order[axis]
    return w("Transpose", w("MatMul", w("Transpose", value, perm=order), right), perm=order)


def _computed(w: Replacement, value: str, axis: int, place: int, amount: int) -> str:
    """[size, new size]: the interpolation matrix along one axis, for sizes that are known only at run time."""
    mode = w.attribute("mode", "nearest")
    if mode not in ("nearest", "linear") or w.attribute("antialias", 0):
        raise w.refusal(f"the size of its input's axis {axis} is not known")
    zero, one, half = w.constant(0.0), w.constant(1.0), w.constant(0.5)
    length = _number(w, w("Squeeze", w("Shape", value, start=axis, end=axis + 1)))
    requested = w("Gather", w.input(place), w.constant(amount, np.int64))
    if place == _SIZES:
        new = _number(w, requested)
        scale = w("Div", new, length)
    else:
        scale = requested
        # As ONNX defines the size that follows from a scale.
        new = w("Floor", w("Mul", length, scale))
    source = _coordinate(w, w("Range", zero, new, one), length, new, scale)
    last = w("Sub", length, one)
    if mode == "nearest":
        rounding = w.attribute("nearest_mode", "round_prefer_floor")
        rounded = {
            # ONNX's Round goes to the even one of two, and Resize to the lower or the upper one.
            "round_prefer_floor": lambda: w("Ceil", w("Sub", source, half)),
            "round_prefer_ceil": lambda: w("Floor", w("Add", source, half)),
            "floor": lambda: w("Floor", source),
            "ceil": lambda: w("Ceil", source),
        }
        source = rounded[rounding]()
    source = w("Min", w("Max", source, zero), last)
    places = w("Unsqueeze", w("Range", zero, length, one), w.ints(1))
    # The weight of a pixel falls linearly to 0 at its neighbours; at integer coordinates it is 1 or 0.
    return w("Relu", w("Sub", one, w("Abs", w("Sub", source, places))))


def _coordinate(w: Replacement, place: str, length: str, new: str, scale: str) -> str:
    """Input coordinate of each output position."""
    one, half = w.constant(1.0), w.constant(0.5)
    mode = w.attribute("coordinate_transformation_mode", "half_pixel")
    if mode == "asymmetric":
        return w("Div", place, scale)
    if mode == "align_corners":
        steps = w("Max", w("Sub", new, one), one)
        return w("Div", w("Mul", place, w("Sub", length, one)), steps)
    centred = w("Sub", w("Div", w("Add", place, half), scale), half)
    if mode == "half_pixel":
        return centred
    if mode == "pytorch_half_pixel":
        return w("Where", w("Greater", new, one), centred, w.constant(0.0))
    raise w.refusal(f"its coordinates are those of {mode!r}, and its sizes are not known")


def _number(w: Replacement, value: str) -> str:
    return w("Cast", value, to=TensorProto.FLOAT)
