"""Decides the roles that position, name and values leave open: by the exporter's records, and by use.

Called by `decide`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import onnx

from ortflow.workflow.graph.autodiff.expand import undifferentiable
from ortflow.workflow.graph.autodiff.path import gradient_path
from ortflow.workflow.graph.ir import shapes
from ortflow.workflow.graph.names import is_made_up
from ortflow.workflow.graph.roles import role_heuristics, scopes

if TYPE_CHECKING:
    from ortflow.workflow.graph.roles.decide import Role

RECORDED = "recorded by the export"
ONE = "a single number"
"""Reasons of roles that are decided again here."""


def by_exporter(
    model: onnx.ModelProto, judged: list[Role], consumers: dict[str, list[tuple[onnx.NodeProto, int]]]
) -> list[Role]:
    """Correct roles by the dynamo exporter's list of the module's parameters and buffers.

    It does not say which parameters are frozen: a table of sines keeps its role.
    """
    listed = scopes.exported_tensors(model)
    parameters, buffers = set(listed["PARAMETER"]), set(listed["BUFFER"])

    def corrected(role: Role) -> Role:
        if role.dtype != "FLOAT" or role.reason == RECORDED:
            return role
        if role.name in parameters and (role.reason == ONE or role.confidence == "guess"):
            return replace(role, role="trained", reason="a parameter of the module", confidence="certain")
        # The scale of a normalisation may be a parameter that was merged with this buffer.
        norms = (node.op_type.endswith("Normalization") for node, _ in consumers.get(role.name, ()))
        if role.name in buffers and role.role != "state" and not any(norms):
            return replace(role, role="constant", reason="a buffer of the module", confidence="certain")
        return role

    return [corrected(role) for role in judged]


def by_use(model: onnx.ModelProto, judged: list[Role]) -> list[Role]:
    """Settle guesses by whether the outputs depend on the tensor differentiably.

    If no output does, the tensor is certainly a constant. A tensor with a name from the module, and with only
    differentiable operators on the way to an output, is a parameter.
    """
    # PyTorch names only parameters and buffers; other exporters may also name other numbers.
    single = model.producer_name == "pytorch"
    guesses = [r.name for r in judged if r.confidence == "guess"]
    listed = {name for names in scopes.exported_tensors(model).values() for name in names}

    def is_own(name: str) -> bool:
        return name in listed if listed else not is_made_up(name)

    numbers = [r.name for r in judged if single and r.reason == ONE and is_own(r.name)]
    if not guesses and not numbers:
        return judged
    outputs = [value.name for value in model.graph.output]
    reached = gradient_path(model.graph, shapes.value_types(model), [*guesses, *numbers], outputs).reached
    candidates = [name for name in guesses if name in reached and is_own(name)]
    light = shapes.without_weights(model)
    together = bool(candidates) and not undifferentiable(light, candidates, outputs)

    def settled(role: Role) -> Role:
        if role.name in numbers and role.name in reached and not role_heuristics.is_buffer_name(role.name):
            return replace(role, confidence="likely")
        if role.confidence != "guess":
            return role
        if role.name not in reached:
            return replace(role, confidence="certain")
        if role.name in candidates and (together or not undifferentiable(light, [role.name], outputs)):
            return replace(role, role="trained", confidence="certain")
        return role

    return [settled(role) for role in judged]
