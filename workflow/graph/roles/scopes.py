"""The module of the exported program that a node or tensor belongs to, as far as the file records it.

Called by `merged` and `lost`. TorchScript names nodes by module (`/layers.0/norm/Add_1`); the dynamo exporter records
the modules in the node's metadata. Other files contain no such information.
"""

from __future__ import annotations

import json
import re

import onnx

_SCOPES = "pkg.torch.onnx.name_scopes"
_SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"
_TARGET = re.compile(r"^\w+: (PARAMETER|BUFFER) target='([^']+)'", re.MULTILINE)
_CALL = re.compile(r"_\d+$")


def module_of(tensor: str) -> str:
    """The module that a parameter's name implies: `layers.0.norm` for `layers.0.norm.weight`."""
    return tensor.rpartition(".")[0]


def belongs(tensor: str, node: onnx.NodeProto) -> bool | None:
    """Whether the node is inside the module that owns the tensor; None if unknown."""
    modules = _modules(node)
    if modules is None:
        return None
    owner = module_of(tensor)
    # TorchScript omits the outermost module in names of nodes, but not in those of tensors.
    return any(module == owner or owner == f"module.{module}" or owner.endswith(f".{module}") for module in modules)


def innermost(node: onnx.NodeProto) -> str | None:
    """The module whose forward created the node, if the dynamo exporter recorded it."""
    modules = _modules(node)
    return modules[-2] if modules is not None and len(modules) > 1 and not node.name.startswith("/") else None


def _modules(node: onnx.NodeProto) -> list[str] | None:
    for prop in node.metadata_props:
        if prop.key == _SCOPES:
            try:
                scopes = json.loads(prop.value.replace("'", '"'))
            except (ValueError, RecursionError):
                return None
            return scopes if isinstance(scopes, list) and all(isinstance(scope, str) for scope in scopes) else None
    if not node.name.startswith("/"):
        return None
    parts = node.name.split("/")[1:-1]
    called_again = [_CALL.sub("", part) for part in parts]
    return [".".join(path[:end]) for path in (parts, called_again) for end in range(len(path), 0, -1)] or [""]


def exported_tensors(model: onnx.ModelProto) -> dict[str, list[str]]:
    """Every PARAMETER and BUFFER of the module that the dynamo exporter was given; empty if not recorded."""
    names: dict[str, list[str]] = {"PARAMETER": [], "BUFFER": []}
    for prop in model.graph.metadata_props:
        if prop.key == _SIGNATURE:
            for kind, name in _TARGET.findall(prop.value):
                names[kind].append(name)
    return names
