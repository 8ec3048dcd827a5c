"""The module of the user's model that a node of a training graph belongs to, for profiles.

From the exporter's metadata, which nodes that replace others inherit, else from names: gradient nodes and pieces of a
replaced node carry the name of the forward node, and nodes with a kernel of ours that of the value they make.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import onnx

from ortflow.workflow.graph.ir.origin import SCOPES, module_path

_GRADIENT = re.compile(r"_Grad(/|$)")
_OF_VALUE = re.compile(r"_grad(/|$)")
"""After the name of a parameter or value whose gradient a node makes."""
_OWN = ("ortflow.",)
"""How names begin of nodes that belong to no node of the model."""


def modules_in(form: Path | bytes) -> dict[str, str]:
    """The module of every node of a graph, in the form that runs, by the node's name.

    Its plain form is beside it. Empty if it cannot be read, because a profile only reports.
    """
    try:
        graph = _graph(form)
        plain = _graph(form.with_name(f"{form.name.partition('.')[0]}.onnx")) if isinstance(form, Path) else graph
    except Exception:  # noqa: BLE001 - protobuf's errors are of several types
        return {}
    of_values = _by_value(plain)
    modules = {}
    for node in graph.node:
        producer = next((of_values[value] for value in node.output if of_values.get(value)), "")
        modules[node.name] = _scope(node) or producer or module_of(node.name)
    return modules


def _by_value(graph: onnx.GraphProto) -> Mapping[str, str]:
    """The module of the node that makes each value; of the gradient of a parameter, the first node that reads it."""
    scopes = {node.name: _scope(node) for node in graph.node if node.name}
    readers: dict[str, str] = {}
    modules = {}
    for node in graph.node:
        module = _scope(node) or scopes.get(forward_of(node.name), "") or module_of(node.name)
        for value in node.input:
            readers.setdefault(value, module)
        for value in node.output:
            of_parameter = _OF_VALUE.split(value)[0] if _OF_VALUE.search(value) else ""
            modules[value] = readers.get(of_parameter) or module
    return modules


def forward_of(name: str) -> str:
    """The name of the forward node in that of a gradient node; the name itself of another node.

    >>> forward_of("/layers.0/fc/Gemm_Grad/MatMul")
    '/layers.0/fc/Gemm'
    """
    return _GRADIENT.split(name)[0]


def module_of(name: str) -> str:
    """The module in a node's name as exporters write it, else the name of the forward node; empty for nodes of ours.

    >>> module_of("/layers.0/fc/Gemm_Grad/MatMul"), module_of("h.0.mlp.gelu/Erf_2"), module_of("/in")
    ('layers.0.fc', 'h.0.mlp.gelu', 'in')
    >>> module_of("layers.0.fc.weight_grad/Product"), module_of("ortflow.Mul.1/Mul"), module_of("moment_1.0.out/Adam")
    ('layers.0.fc', '', '')
    """
    forward = forward_of(name)
    if forward.startswith(_OWN) or forward.partition("/")[0].endswith(".out"):
        return ""
    if _OF_VALUE.search(forward):
        return _OF_VALUE.split(forward)[0].strip("/").replace("/", ".").rpartition(".")[0]
    if forward.startswith("/"):
        parts = forward.strip("/").split("/")
        return ".".join(parts[:-1] or parts)
    return forward.partition("/")[0]


def _graph(model: Path | bytes) -> onnx.GraphProto:
    return onnx.load_model_from_string(model if isinstance(model, bytes) else model.read_bytes()).graph


def _scope(node: onnx.NodeProto) -> str:
    return next((module_path(prop.value) for prop in node.metadata_props if prop.key == SCOPES), "")
