"""Signs that an exporter changed the model so that training it would not train what the user wrote.

Called by `inspect`. Torch's exporters are made for inference: with their defaults they merge weights that happen to be
equal, fold weights into constants and BatchNormalization into convolutions, and the graph still computes the same.
"""

from __future__ import annotations

import math
import re

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from ortflow.workflow.graph import evidence, walk
from ortflow.workflow.graph.roles import METADATA, Roles

_EXPORT = "export the model with ortflow.export_for_training"
_VAL = re.compile(r"^val_\d+$")
_FOLDED_CONV = re.compile(r"^onnx::Conv_\d+$")
_LARGE = 64
_NORM_INPUTS = {
    "LayerNormalization": (1, 2),
    "BatchNormalization": (1, 2, 3, 4),
    "GroupNormalization": (1, 2),
    "SimplifiedLayerNormalization": (1,),
    "RMSNormalization": (1,),
}


def signs_of_wrong_export(model: onnx.ModelProto, roles: Roles) -> list[str]:
    """A sentence for each sign, with what to do; empty for a model that export_for_training wrote."""
    if any(prop.key in METADATA for prop in model.metadata_props):
        return []
    return [*_merged(model), *_folded_weights(model, roles), *_folded_norms(model)]


def _merged(model: onnx.ModelProto) -> list[str]:
    """Normalisations that share a weight whose values are all equal: not tied by the user, merged by the exporter."""
    found = []
    consumers = walk.consumers(model.graph)
    if _layers_are_shared(model, consumers):
        return []
    for tensor in model.graph.initializer:
        norms = [
            node for node, place in evidence.uses(tensor.name, consumers) if place in _NORM_INPUTS.get(node.op_type, ())
        ]
        if len(norms) > 1 and _uniform(tensor):
            found.append(
                f"{tensor.name!r} feeds {len(norms)} {norms[0].op_type} nodes: the exporter merged weights of equal"
                f" value, which would train as one; {_EXPORT}"
            )
    return found


def _layers_are_shared(model: onnx.ModelProto, consumers: dict[str, list[tuple[onnx.NodeProto, int]]]) -> bool:
    """Whether the model uses whole layers several times, as ALBERT does: then its matrices are shared, too."""
    counts: list[int] = []
    for tensor in model.graph.initializer:
        places = [use for use in evidence.uses(tensor.name, consumers) if evidence.is_weight(*use)]
        if len(tensor.dims) >= 2 and tensor.data_type == TensorProto.FLOAT and places:
            counts.append(sum(node.op_type != "Gather" for node, _ in places))
    return sum(count > 1 for count in counts) * 2 > len(counts)


def _uniform(tensor: onnx.TensorProto) -> bool:
    if tensor.data_type != TensorProto.FLOAT or math.prod(tensor.dims) < 2:
        return False
    flat = numpy_helper.to_array(tensor).reshape(-1)
    equal = np.equal(flat, flat[0])
    return bool(equal.all())


def _folded_weights(model: onnx.ModelProto, roles: Roles) -> list[str]:
    names = [
        role.name
        for role in roles
        if _VAL.match(role.name)
        and role.dtype == "FLOAT"
        and role.count >= _LARGE
        and len(role.shape) >= 2
        and not role.reason.startswith("holds ")
    ]
    if not names:
        return []
    return [
        f"{len(names)} large constant{'s' if len(names) > 1 else ''} named by the exporter, such as {names[0]!r}: it"
        f" folded weights into them, which lose their names and what they were tied to; {_EXPORT}"
    ]


def _folded_norms(model: onnx.ModelProto) -> list[str]:
    folded = [node for node in model.graph.node if node.op_type == "Conv" and _is_folded(node)]
    if not folded:
        return []
    return [
        f"BatchNormalization is folded into {len(folded)} convolution{'s' if len(folded) > 1 else ''}, such as"
        f" {walk.called(folded[0])}, and would not train; {_EXPORT}"
    ]


def _is_folded(node: onnx.NodeProto) -> bool:
    """By the names TorchScript's exporter gives such weights, or by the rule that dynamo's leaves in the node."""
    if len(node.input) > 2 and all(_FOLDED_CONV.match(name) for name in node.input[1:3]):
        return True
    return any(
        prop.key == "pkg.onnxscript.rewriter.rule_name" and "FuseBatchNorm" in prop.value
        for prop in node.metadata_props
    )
