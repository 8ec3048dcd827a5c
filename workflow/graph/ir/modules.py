"""The module of the user's model that a node of a training graph belongs to, for profiles.

From the exporter's metadata, which nodes that replace others inherit, else from names: gradient nodes and pieces of a
replaced node carry the name of the forward node.
"""

from __future__ import annotations

import re
from pathlib import Path

import onnx

from ortflow.workflow.graph.ir.origin import SCOPES, module_path

_GRADIENT = re.compile(r"_Grad(/|$)")
_SUM = re.compile(r"_grad(/|$)")
"""After the name of a parameter or value whose gradient a node makes."""
OWN = "ortflow."
"""How names begin of nodes that belong to no node of the model."""


def modules_in(model: Path | bytes) -> dict[str, str]:
    """The module of every node with a name; empty if the graph cannot be read, because a profile only reports."""
    try:
        graph = onnx.load_model_from_string(model if isinstance(model, bytes) else model.read_bytes()).graph
    except Exception:  # noqa: BLE001 - protobuf's errors are of several types
        return {}
    scopes = {node.name: _scope(node) for node in graph.node if node.name}
    return {name: scope or scopes.get(forward_of(name), "") or module_of(name) for name, scope in scopes.items()}


def forward_of(name: str) -> str:
    """The name of the forward node in that of a gradient node; the name itself of another node.

    >>> forward_of("/layers.0/fc/Gemm_Grad/MatMul")
    '/layers.0/fc/Gemm'
    """
    return _GRADIENT.split(name)[0]


def module_of(name: str) -> str:
    """The module in a node's name, as the exporters of PyTorch, TensorFlow and ortflow's examples write it.

    >>> module_of("/layers.0/fc/Gemm_Grad/MatMul"), module_of("layers.0.fc.weight_grad/Product")
    ('layers.0.fc', 'layers.0.fc')
    """
    name = forward_of(name)
    of_parameter = _SUM.search(name)
    if of_parameter:
        return _SUM.split(name)[0].strip("/").replace("/", ".").rpartition(".")[0]
    if name.startswith(OWN):
        return ""
    if name.startswith("/"):
        return ".".join(name.strip("/").split("/")[:-1])
    return name.partition("/")[0]


def _scope(node: onnx.NodeProto) -> str:
    return next((module_path(prop.value) for prop in node.metadata_props if prop.key == SCOPES), "")
