"""Finds parameters that an exporter eliminated: folded into others, into constants, or removed.

Called by `export_warnings`. Evidence in the graph itself comes first, then the exporter's own records.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import onnx

from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.roles import role_heuristics, scopes
from ortflow.workflow.graph.roles.decide import Roles

_DYNAMO = re.compile(r"^val_\d+$")
_TORCHSCRIPT = re.compile(r"^onnx::[A-Z]\w*_\d+$")
_PART_OF_A_TUPLE = re.compile(r"^getitem(_\d+)?$")
"""The dynamo exporter's names for results of BatchNormalization, which no convolution has."""
_RULE = "pkg.onnxscript.rewriter.rule_name"
_FUSION = re.compile(r"FuseBatchNorm|AffineConvFusion|ConvAffineFusion")
_CONVOLUTIONS = ("Conv", "ConvTranspose", "Gemm")
_REPARAMETRISED = re.compile(r"(^|\.)parametrizations\.|\.(weight|bias)_(g|v|orig)$")


def _parents(module: str) -> Iterator[str]:
    while module:
        module = scopes.module_of(module)
        yield module


def _borrowing(model: onnx.ModelProto, parameters: set[str]) -> Iterator[str]:
    """Modules that read a parameter under the name that it has in another module."""
    consumers = walk.readers(model.graph)
    for name in parameters:
        for node, _ in role_heuristics.uses(name, consumers):
            module = scopes.innermost(node)
            if module is not None and not scopes.belongs(name, node):
                yield module


def is_folded_name(name: str) -> bool:
    """Whether an exporter generated the name for a tensor that it computed from others."""
    return _DYNAMO.match(name) is not None or _TORCHSCRIPT.match(name) is not None


def folded_norms(model: onnx.ModelProto) -> list[str]:
    """BatchNormalization, or another scale and shift, that was folded into the weights before it."""
    initializers = {tensor.name for tensor in model.graph.initializer}
    folded = [node for node in model.graph.node if node.op_type in _CONVOLUTIONS and _has_folded(node, initializers)]
    if not folded:
        return []
    layers = f"{len(folded)} layer{'s' if len(folded) > 1 else ''}"
    return [
        f"BatchNormalization is folded into the weights of {layers}, such as {walk.called(folded[0])}, and would not"
        " train"
    ]


def _has_folded(node: onnx.NodeProto, initializers: set[str]) -> bool:
    if any(prop.key == _RULE and _FUSION.search(prop.value) for prop in node.metadata_props):
        return True
    weight, bias = (str(name) for name in [*node.input, "", ""][1:3])
    if node.op_type == "Gemm":
        return bias == f"{weight}_bias"
    # A convolution reads its weight unchanged from the module; a computed weight has something folded into it.
    computed = weight in initializers and is_folded_name(weight)
    return computed or bias == f"{weight}_bias" or bool(_PART_OF_A_TUPLE.match(node.output[0]))


def folded_scales(model: onnx.ModelProto, roles: Roles) -> list[str]:
    """Scales and shifts of normalisations that became constants, and would not be trained."""
    lost = scopes.exported_tensors(model)["PARAMETER"]
    present = {tensor.name for tensor in model.graph.initializer}
    if lost and present.issuperset(lost):
        return []
    folded = [r.name for r in roles if r.role == "constant" and r.count > 1 and is_folded_name(r.name)]
    if not folded:
        return []
    producers, consumers = walk.producers(model.graph), walk.readers(model.graph)
    scales = [
        name
        for name in folded
        if any(_scales_a_norm(node, place, producers) for node, place in role_heuristics.uses(name, consumers))
    ]
    if not scales:
        return []
    return [
        f"{len(scales)} constant{'s' if len(scales) > 1 else ''}, such as {scales[0]!r}, scale or shift the output "
        f"of a normalisation: the exporter folded parameters into them, which would not train"
    ]


def _scales_a_norm(node: onnx.NodeProto, place: int, producers: Mapping[str, onnx.NodeProto]) -> bool:
    """Whether this operand of Mul, or of Add after a Mul, is combined with a normalisation, perhaps after a Reshape."""
    if node.op_type not in ("Mul", "Add") or place > 1:
        return False
    behind = producers.get(node.input[1 - place])
    for _ in range(3):
        if behind is None:
            return False
        if behind.op_type.endswith("Normalization"):
            return True
        if behind.op_type not in ("Reshape", "Mul"):
            return False
        behind = producers.get(behind.input[0]) or producers.get(behind.input[-1])
    return False


def lost_parameters(model: onnx.ModelProto, roles: Roles) -> list[str]:
    """Parameters that the dynamo exporter lists for modules in use, and that the graph lacks.

    A transposed matrix is in the graph under another name, and a tied tensor under another of its names: these are
    trained and not lost. A module without any parameters left may be one that the outputs do not depend on.
    """
    listed = scopes.exported_tensors(model)
    present = {tensor.name for tensor in model.graph.initializer}
    missing = [name for name in listed["PARAMETER"] if name not in present]
    if not missing:
        return []
    used = {scopes.module_of(name) for name in listed["PARAMETER"] if name in present}
    parents = {parent for module in used for parent in _parents(module)}
    borrowing = set(_borrowing(model, present.intersection(listed["PARAMETER"])))
    transposed = any(is_folded_name(name) for name in present)
    folded = any(role.confidence == "guess" for role in roles)

    def is_lost(name: str) -> bool:
        if _REPARAMETRISED.search(name):
            return True
        module, _, kind = name.rpartition(".")
        if module in borrowing or (transposed and kind.startswith("weight")):
            return False
        # A single parameter of the root module is often unused, for example a mask token; folding leaves a constant.
        return module in used or (folded and module in parents)

    lost = [name for name in missing if is_lost(name)]
    if not lost:
        return []
    return [
        f"{len(lost)} parameter{'s' if len(lost) > 1 else ''} of the module, such as {lost[0]!r},"
        f" {'are' if len(lost) > 1 else 'is'} not in the file: the exporter removed or folded parameters that "
        f"do not change the outputs yet"
    ]
