"""Converts a graph to opset 18, the only opset that the following modules support.

Called by `prepare`. Opset 18 has every operator that ONNX Runtime's gradients support, is what PyTorch's exporter
writes, and is the first with a ScatterElements that adds. The few changes between opsets 13 and 18 are made here; newer
operators are replaced by ONNX's own definition in older ones if there is one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import onnx
from onnx import defs, helper, numpy_helper, shape_inference, version_converter

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.decompose.operators import WRITTEN_OUT
from ortflow.workflow.graph.domains import CLASSICAL, MICROSOFT
from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.ir.edit import replace
from ortflow.workflow.graph.ir.functions import instantiate, schema_function
from ortflow.workflow.graph.ir.replacement import MISFITS, Context, context_of
from ortflow.workflow.graph.ir.shapes import without_weights
from ortflow.workflow.graph.ir.writer import Fresh

OPSET = 18
_AGAIN = "export the model again with opset_version=18"

# Reductions whose axes were an attribute up to opset 17 (for ReduceSum, an input since opset 13).
_AXES_ATTRIBUTE = frozenset(
    [
        "ReduceL1",
        "ReduceL2",
        "ReduceLogSum",
        "ReduceLogSumExp",
        "ReduceMax",
        "ReduceMean",
        "ReduceMin",
        "ReduceProd",
        "ReduceSumSquare",
    ]
)
# Same attributes and inputs as in opset 18, but different semantics from this version on.
_OTHER_MEANING = {"GroupNormalization": 21}
# Attribute values that opset 18 does not have.
_NEW_VALUES: dict[tuple[str, str], list[Any]] = {
    ("Pad", "mode"): [b"wrap"],
    ("Resize", "coordinate_transformation_mode"): [b"half_pixel_symmetric"],
    ("Cast", "saturate"): [0],
}
_RENAMED_VALUES = {("GridSample", "mode"): {b"linear": b"bilinear", b"cubic": b"bicubic"}}


def opset_of(model: onnx.ModelProto) -> int:
    """Version of ONNX's operators that the model imports; 0 if it imports none."""
    return max((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), default=0)


def raise_old_opset(model: onnx.ModelProto, version: int, location: str) -> None:
    """Convert a model of an older opset to `version` by onnx's converter, in place. Functions must be inlined."""
    light = without_weights(model)
    try:
        converted = version_converter.convert_version(light, version)
    except (version_converter.ConvertError, shape_inference.InferenceError, RuntimeError, ValueError):
        raise UserError(
            f"the model is of opset {opset_of(model)}, which onnx cannot convert to {version}",
            where=location,
            fix=_AGAIN,
        ) from None
    light_names = {tensor.name for tensor in light.graph.initializer}
    large = [tensor for tensor in model.graph.initializer if tensor.name not in light_names]
    large = [onnx.TensorProto.FromString(tensor.SerializeToString()) for tensor in large]
    replace(model.graph.node, list(converted.graph.node))
    del model.graph.initializer[:]
    model.graph.initializer.extend([*large, *converted.graph.initializer])
    del model.opset_import[:]
    model.opset_import.extend(converted.opset_import)


def to_opset_18(model: onnx.ModelProto, location: str) -> list[str]:
    """Convert the model to opset 18, in place; returns log lines. Functions must be inlined before.

    Raises UserError naming the node that has no form in opset 18.
    """
    version = opset_of(model)
    if version > defs.onnx_opset_version():
        raise UserError(
            f"the model is of opset {version}, which the installed onnx does not support", where=location, fix=_AGAIN
        )
    notes = [] if version == OPSET else [f"opset {version} converted to {OPSET}"]
    if version != OPSET:
        _rewrite(model.graph, version, context_of(model), location)
    versions = {"": OPSET, MICROSOFT: 1}
    versions |= {imported.domain: imported.version for imported in model.opset_import if imported.domain == CLASSICAL}
    del model.opset_import[:]
    model.opset_import.extend(helper.make_opsetid(*opset) for opset in versions.items())
    return notes


def _rewrite(graph: onnx.GraphProto, version: int, context: Context, location: str) -> None:
    for node in graph.node:
        for subgraph in walk.subgraphs(node):
            _rewrite(subgraph, version, context, location)
    replace(graph.node, list(at_opset_18(graph.node, version, context, location)))


def at_opset_18(
    nodes: Iterable[onnx.NodeProto], version: int, context: Context, location: str
) -> Iterable[onnx.NodeProto]:
    """Convert `nodes` from opset `version` to opset 18; changes them in place where that suffices."""
    for node in nodes:
        if node.domain != "" or version == OPSET:
            yield node
        elif version < OPSET:
            yield from _raised(node, context.fresh)
        elif _lowered(node, version):
            yield node
        elif node.op_type in WRITTEN_OUT:
            try:
                yield from WRITTEN_OUT[node.op_type](node, context)
            except MISFITS:
                raise UserError(
                    f"{walk.called(node)} has attributes that do not match its inputs", where=location
                ) from None
        else:
            try:
                definition = schema_function(node, version, context.types)
            except MISFITS:
                definition = None
            if definition is None:
                raise UserError(
                    f"{walk.called(node)}, of opset {version}, has no equivalent in opset {OPSET}",
                    where=location,
                    fix=_AGAIN,
                )
            function, body_version, defaults = definition
            body = instantiate(function, node, context.fresh, defaults)
            yield from at_opset_18(body, body_version, context, location)


def _raised(node: onnx.NodeProto, fresh: Fresh) -> list[onnx.NodeProto]:
    """Convert a node of opset 13 to 17."""
    if node.op_type in _AXES_ATTRIBUTE and len(node.input) == 1:
        axes = _pop(node, "axes")
        if axes is not None:
            name = fresh(f"{node.output[0]}.axes")
            node.input.append(name)
            return [
                helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.array(axes.ints, np.int64))),
                node,
            ]
    # Opset 18 takes either sizes or the number of outputs, and not neither.
    if node.op_type == "Split" and len(node.input) < 2:
        node.attribute.append(helper.make_attribute("num_outputs", len(node.output)))
    if node.op_type == "BatchNormalization" and len(node.output) > 1:
        # In training mode, a node has five outputs up to opset 13, and three and an attribute from 14 on.
        del node.output[3:]
        if not any(a.name == "training_mode" for a in node.attribute):
            node.attribute.append(helper.make_attribute("training_mode", 1))
    return [node]


def _lowered(node: onnx.NodeProto, version: int) -> bool:
    """Whether a node of an opset above 18 is valid in opset 18 after small changes, which are made in place."""
    newer = defs.get_schema(node.op_type, version, "") if defs.has(node.op_type, "") else None
    try:
        target_schema = defs.get_schema(node.op_type, OPSET, "")
    except defs.SchemaError:
        return False
    if newer is None or newer.since_version == target_schema.since_version:
        return newer is not None
    if (
        newer.since_version >= _OTHER_MEANING.get(node.op_type, version + 1)
        or len(node.input) > target_schema.max_input
    ):
        return False
    for attribute in list(node.attribute):
        value: Any = helper.get_attribute_value(attribute)
        key = (node.op_type, attribute.name)
        if value in _NEW_VALUES.get(key, []):
            return False
        if attribute.name not in target_schema.attributes:
            if not _has_no_effect(newer, attribute.name, value):
                return False
            _pop(node, attribute.name)
        elif key in _RENAMED_VALUES:
            attribute.s = _RENAMED_VALUES[key].get(value, value)
    return True


def _has_no_effect(schema: Any, name: str, value: Any) -> bool:
    """Whether an attribute has its default value (for AveragePool's dilations, ones)."""
    if schema.name == "AveragePool" and name == "dilations":
        return set(value) <= {1}
    default = schema.attributes[name].default_value if name in schema.attributes else None
    return default is not None and bool(default.name) and bool(helper.get_attribute_value(default) == value)


def _pop(node: onnx.NodeProto, name: str) -> onnx.AttributeProto | None:
    for i, attribute in enumerate(node.attribute):
        if attribute.name == name:
            copy = onnx.AttributeProto.FromString(attribute.SerializeToString())
            del node.attribute[i]
            return copy
    return None
