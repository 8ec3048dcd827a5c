"""Checks in a child process whether ONNX Runtime loads a graph, and which node is at fault if it does not.

Called by `build` with complete graphs.
"""

from __future__ import annotations

import re

import onnx

from ortflow.workflow.assembly.child import Child, RuntimeFault
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.ir.origin import node_of, origin
from ortflow.workflow.kernels.library import Library

_FIX = "replace it by operators that ONNX Runtime supports, or freeze the parameters before it"
# "Could not find an implementation for ConvTranspose(1) node with name '/up/ConvTranspose'"
_NO_KERNEL = re.compile(r"Could not find an implementation for (\w+)\(\d+\) node with name '([^']*)'")
# A node of a gradient is named after the forward node: "/up_Grad/ConvTranspose_0".
_MADE = re.compile(r"^(.*)_Grad/[^/]*$")


def check_loads(
    child: Child, model: bytes, graph_name: str, forward: onnx.ModelProto, *, optimized: bool = True
) -> None:
    """Raises UserError if ONNX Runtime cannot run the graph on the CPU.

    Names the node if ONNX Runtime does, and its origin in PyTorch if the `forward` graph records it. A graph that no
    rank of this machine opens is checked without optimizers, which take most of the time.
    """
    try:
        child.load(model, optimized=optimized)
    except RuntimeFault as fault:
        missing = _NO_KERNEL.search(fault.message)
        if missing is None:
            raise UserError(
                f"ONNX Runtime cannot load the {graph_name} graph ({_short(fault)})", where="model.path"
            ) from None
        operator, node = missing[1], missing[2]
        origin = _MADE.match(node)
        if origin:
            raise UserError(
                f"{_named(forward, origin[1])} has a gradient, {operator}, that ONNX Runtime cannot compute on cpu",
                where="model.path",
                fix=_FIX,
            ) from None
        raise UserError(
            f"ONNX Runtime has no kernel on cpu for {_named(forward, node, operator)}",
            where="model.path",
            fix=_FIX,
        ) from None


def has_kernels(library: Library | None) -> bool:
    """Whether this machine has ortflow's operators."""
    return library is not None and library.path is not None


def kernels_fault(child: Child, model: bytes, library: Library | None) -> str | None:
    """Why the graph with ortflow's operators cannot be loaded; None if it can, or if there is no library."""
    if library is None or library.path is None:
        return None
    try:
        child.load(model, library.path)
    except RuntimeFault as fault:
        return _short(fault)
    return None


def _named(forward: onnx.ModelProto, name: str, operator: str = "") -> str:
    """How messages name a node that ONNX Runtime reports."""
    node = node_of(name, forward.graph.node)
    if node is not None and (not operator or node.op_type == operator):
        return walk.called(node)
    place = f"; {origin(node)}" if node is not None and origin(node) else ""
    return f"node {walk.quoted(name)} ({operator}{place})" if operator else f"node {walk.quoted(name)}"


def _short(fault: RuntimeFault) -> str:
    """Shorten the error message: ONNX Runtime's messages contain file names and C++ signatures."""
    if fault.crashed:
        return f"it crashed, {fault.message}"
    text = " ".join(fault.message.split())
    text = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", text)
    return text if len(text) <= 200 else "… " + text[-200:]
