"""The position in the user's PyTorch program that a node comes from, as the exporter recorded it in the node.

Called by `walk` for messages, by `expand` for nodes that replace others, and by `ortflow.export`. The metadata is
untrusted text: whatever cannot be parsed is ignored.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx

SCOPES = "pkg.torch.onnx.name_scopes"
"""Metadata key: the list of the modules around a node, outermost first, and the operation, as a Python literal."""
STACK = "pkg.torch.onnx.stack_trace"
"""Metadata key: the Python lines that led to a node, innermost last, in the format of a traceback."""
CLASSES = "pkg.torch.onnx.class_hierarchy"
"""Metadata key: the list of the classes of these modules, and PyTorch's operator (`aten.max.dim`), likewise."""
LAYER = "ortflow.layer"
"""Metadata key: number of the layer that a node of a training graph belongs to (`optimize.layer_marks`)."""
DROPOUT = "ortflow.dropout"
"""Metadata key: number of a Dropout among those of the undivided training graph (`objective.modes`)."""

_FRAME = re.compile(r'File "([^"\n]{1,4096})", line (\d{1,9})')
_LIBRARY = re.compile(r"[/\\]torch[/\\](nn|fx|utils|autograd|export|onnx|_\w+|functional\.py|overrides\.py)\b")
_MOST = 100_000


def origin(node: onnx.NodeProto) -> str:
    """`module 'layers.0.act', model.py line 31`; only the known parts, or empty."""
    noted = {prop.key: prop.value for prop in node.metadata_props if prop.key in (SCOPES, STACK)}
    module, line = module_path(noted.get(SCOPES, "")), user_line(noted.get(STACK, ""))
    parts = [f"module {module!r}"] if module else []
    return ", ".join([*parts, f"{line[0]} line {line[1]}"] if line else parts)


def module_path(scopes: str) -> str:
    """The innermost module recorded under `SCOPES`; empty for the outermost one."""
    names = names_of(scopes)
    if len(names) < 2 or not isinstance(names[-2], str):
        return ""
    return names[-2] if len(names[-2]) <= 160 else names[-2][:157] + "..."


def scopes_of(node: onnx.NodeProto) -> list[str]:
    """The modules around a node, outermost first, then the prefixes of its name."""
    noted = next((prop.value for prop in node.metadata_props if prop.key == SCOPES), "")
    steps = node.name.strip("/").replace("/", ".").split(".")
    beginnings = [".".join(steps[: count + 1]) for count in range(len(steps))]
    return [scope for scope in (*names_of(noted), *beginnings) if isinstance(scope, str) and scope]


def names_of(scopes: str) -> list[object]:
    """The list recorded under `SCOPES`; empty if it is not a list of text."""
    try:
        names = ast.literal_eval(scopes) if 0 < len(scopes) < _MOST else []
    except (ValueError, TypeError, ArithmeticError, SyntaxError, RecursionError, MemoryError):
        return []
    return names if isinstance(names, list) else []


def torch_operator(node: onnx.NodeProto) -> str:
    """PyTorch's operator that a node is part of, such as `aten.max.dim`; empty if it is not recorded.

    Only PyTorch's newer exporter (`dynamo=True`) records it.
    """
    for prop in node.metadata_props:
        if prop.key == CLASSES:
            names = names_of(prop.value)
            return names[-1] if names and isinstance(names[-1], str) else ""
    return ""


def user_line(stack: str) -> tuple[str, int] | None:
    """File name without folders, and line, of the innermost frame in `stack` that is not in PyTorch itself."""
    frames = _FRAME.findall(stack[-_MOST:])
    for path, line in reversed(frames):
        if not is_pytorch(path):
            return re.split(r"[/\\]", path)[-1], int(line)
    return None


def is_pytorch(path: str) -> bool:
    """Whether a source file belongs to PyTorch."""
    return _LIBRARY.search(path) is not None


def inherit(new_nodes: Iterable[onnx.NodeProto], node: onnx.NodeProto) -> None:
    """Record the origin of `node` in the nodes that replace it, in place."""
    noted = [prop for prop in node.metadata_props if prop.key in (SCOPES, STACK, CLASSES, LAYER)]
    for new_node in new_nodes if noted else ():
        if not new_node.metadata_props:
            new_node.metadata_props.extend(noted)


def node_of(name: str, nodes: Sequence[onnx.NodeProto]) -> onnx.NodeProto | None:
    """The node of this name, or the one that a node of this name was derived from: `act` for `act/Mul_1`."""
    candidates = [node for node in nodes if node.name and (name == node.name or name.startswith(f"{node.name}/"))]
    return max(candidates, key=lambda node: len(node.name), default=None)
