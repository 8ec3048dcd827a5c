"""Makes the gradient graph of a forward graph, in a child process, and names the node where that fails.

Called by `build` with a graph whose parameters are inputs and whose loss is an output; `child` does the work.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import onnx
from onnx import TensorProto, helper

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph import shapes, walk
from ortflow.workflow.graph.child import Child, RuntimeFault
from ortflow.workflow.graph.edit import Editor, prune, replace, used
from ortflow.workflow.graph.origin import node_of, origin
from ortflow.workflow.graph.stops import hide_stops, show_stops
from ortflow.workflow.kernels.library import Library

_FIX = "replace it by operators that ONNX Runtime can train, or freeze the parameters before it"
# gradient_builder_registry.cc: "The gradient builder has not been registered: HardSwish for node /act/HardSwish"
_NO_GRADIENT = re.compile(r"gradient builder has not been registered: (\S+) for node (.*)")
# "Could not find an implementation for ConvTransposeGrad(1) node with name '/up_Grad/ConvTransposeGrad_0'"
_NO_KERNEL = re.compile(r"Could not find an implementation for (\w+)\(\d+\) node with name '([^']*)'")
_UNREACHED = re.compile(r"Cannot compute the partial derivative for '(.*)' as it's unreachable")
# A node that the builder made is named after the forward node: "/up_Grad/ConvTransposeGrad_0".
_MADE = re.compile(r"^(.*)_Grad/[^/]*$")


def gradient_graph(
    child: Child, forward: onnx.ModelProto, loss: str, parameters: Sequence[str]
) -> tuple[onnx.ModelProto, list[str]]:
    """The graph with the further outputs `<parameter>_grad`, and the parameters that have one.

    Those that the loss does not depend on have none. Raises UserError, naming operator and node where they can be
    found.
    """
    read = used(forward.graph)
    reached = [name for name in parameters if name in read]
    hidden = onnx.ModelProto()
    hidden.CopyFrom(forward)
    stopped = hide_stops(hidden.graph)
    data = hidden.SerializeToString(deterministic=True)
    while True:
        if not reached:
            raise UserError("the loss depends on no parameter that is trained", where="model.loss")
        try:
            model = onnx.ModelProto.FromString(child.gradient(data, reached, loss))
            break
        except RuntimeFault as fault:
            found = _UNREACHED.search(fault.message)
            if found is None or found[1] not in reached:
                raise _explained(forward, fault) from None
            reached.remove(found[1])
    show_stops(model.graph, stopped)
    # The builder hands outputs over in the order of a hash table.
    order = {value.name: i for i, value in enumerate(forward.graph.output)}
    order |= {f"{name}_grad": len(order) + i for i, name in enumerate(reached)}
    replace(model.graph.output, sorted(model.graph.output, key=lambda value: order[value.name]))
    return model, reached


def check_loads(child: Child, model: bytes, what: str, device: str, forward: onnx.ModelProto) -> None:
    """Raises UserError where ONNX Runtime cannot run the graph on the device.

    Names the node if ONNX Runtime does, and its place in PyTorch if `forward`, which the graph was made of, says it.
    """
    try:
        child.load(model, device)
    except RuntimeFault as fault:
        found = _NO_KERNEL.search(fault.message)
        if found is None:
            raise UserError(
                f"ONNX Runtime cannot load the {what} graph ({_short(fault)})", where="model.path"
            ) from None
        operator, node = found[1], found[2]
        made = _MADE.match(node)
        if made:
            raise UserError(
                f"{_named(forward, made[1])} has a gradient, {operator}, that ONNX Runtime cannot compute on {device}",
                where="model.path",
                fix=_FIX,
            ) from None
        raise UserError(
            f"ONNX Runtime has no kernel on {device} for {_named(forward, node, operator)}",
            where="model.path",
            fix=_FIX,
        ) from None


def kernels_fault(child: Child, model: bytes, library: Library | None, device: str) -> str | None:
    """Why the graph with our own operators does not load here; None where it does, or where no library can tell."""
    if library is None or library.path is None:
        return None
    try:
        child.load(model, device, library.path)
    except RuntimeFault as fault:
        return _short(fault)
    return None


def _explained(forward: onnx.ModelProto, fault: RuntimeFault) -> UserError:
    found = _NO_GRADIENT.search(fault.message)
    if found:
        named = _named(forward, found[2], found[1]) if found[2] else f"operator {found[1]}"
        return UserError(f"{named} has no gradient", where="model.path", fix=_FIX)
    node = _culprit(forward)
    if node is not None:
        return UserError(
            f"ONNX Runtime cannot differentiate {walk.called(node)} ({_short(fault)})", where="model.path", fix=_FIX
        )
    return UserError(f"ONNX Runtime cannot differentiate the model ({_short(fault)})", where="model.path")


def _named(forward: onnx.ModelProto, name: str, operator: str = "") -> str:
    """A node that ONNX Runtime gives the name of, as messages name it."""
    node = node_of(name, forward.graph.node)
    if node is not None and (not operator or node.op_type == operator):
        return walk.called(node)
    place = f"; {origin(node)}" if node is not None and origin(node) else ""
    return f"node {walk.quoted(name)} ({operator}{place})" if operator else f"node {walk.quoted(name)}"


def _culprit(forward: onnx.ModelProto) -> onnx.NodeProto | None:
    """The first node that cannot be differentiated even on its own; None where each can.

    The loss of a node's graph is the sum of its first output, its parameters are its float inputs.
    """
    types = shapes.value_types(forward)
    with Child() as child:
        for node in forward.graph.node:
            alone = _alone(forward, node, types)
            if alone is None:
                continue
            try:
                child.gradient(*alone)
            except RuntimeFault as fault:
                # A node on no way to the loss is no fault here.
                if "unreachable" not in fault.message:
                    return node
    return None


def _alone(
    forward: onnx.ModelProto, node: onnx.NodeProto, types: dict[str, onnx.TypeProto]
) -> tuple[bytes, list[str], str] | None:
    model = onnx.ModelProto(ir_version=forward.ir_version, opset_import=forward.opset_import)
    model.graph.name = "alone"
    graph = model.graph
    constants = {tensor.name: tensor for tensor in forward.graph.initializer}
    parameters = []
    for name in sorted(walk.inputs(node)):
        if name in constants:
            graph.initializer.append(constants[name])
        elif name in types:
            graph.input.append(helper.make_value_info(name, types[name]))
            if shapes.element_type(types, name) == TensorProto.FLOAT:
                parameters.append(name)
        else:
            return None
    result = node.output[0]
    if not parameters or shapes.element_type(types, result) not in (TensorProto.FLOAT, TensorProto.UNDEFINED):
        return None
    graph.node.append(node)
    edit = Editor(graph)
    loss = edit.total(result, "ortflow.alone")
    graph.output.append(helper.make_tensor_value_info(loss, TensorProto.FLOAT, []))
    prune(graph)
    return model.SerializeToString(), parameters, loss


def _short(fault: RuntimeFault) -> str:
    """The fault in a few words: ONNX Runtime's messages carry file names and C++ signatures."""
    if fault.crashed:
        return f"it crashed, {fault.message}"
    text = " ".join(fault.message.split())
    text = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", text)
    return text if len(text) <= 200 else "… " + text[-200:]
