"""Decides what each initializer is: a parameter (trained or frozen), a constant, or state that the forward pass
updates.

Called by `assembly`, and by `inspect`, which lists the decisions. The user's patterns take precedence over the
exporter's records in the model (`ortflow.export_for_training`), and these over the heuristics applied here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.file.tensors import count_where, type_name
from ortflow.workflow.graph.head import PARAMETERS
from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.ir.recorded_roles import CONSTANTS, FROZEN, STATE, recorded
from ortflow.workflow.graph.names import is_made_up, is_own
from ortflow.workflow.graph.patterns import matches
from ortflow.workflow.graph.roles import role_heuristics
from ortflow.workflow.graph.roles.settle import ONE, RECORDED, by_exporter, by_use
from ortflow.workflow.spec.model import ParameterPatterns

RoleName = Literal["trained", "frozen", "constant", "state"]
Confidence = Literal["certain", "likely", "guess"]

_QUANTISED = (TensorProto.INT8, TensorProto.UINT8)

METADATA: dict[str, RoleName] = {
    PARAMETERS: "trained",
    FROZEN: "frozen",
    CONSTANTS: "constant",
    STATE: "state",
}
"""Properties of the model in which the export function lists its tensors' roles: JSON lists of names."""


@dataclass(frozen=True)
class Role:
    """The role of an initializer, and a short reason."""

    name: str
    shape: tuple[int, ...]
    role: RoleName
    reason: str
    dtype: str
    confidence: Confidence = "certain"
    """For a constant: `likely` if its name or a pattern in its values supports it, `guess` if only its position and
    name are unusual for a parameter.
    """

    @property
    def count(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))


_SHOWN = 8
"""Initializers that a message lists."""


class Roles:
    """The role of every initializer, in the model's order."""

    def __init__(self, entries: Sequence[Role]) -> None:
        self.entries = tuple(entries)
        self._by_name = {entry.name: entry for entry in self.entries}

    def __iter__(self) -> Iterator[Role]:
        return iter(self.entries)

    def __getitem__(self, name: str) -> Role:
        return self._by_name[name]

    def of(self, *roles: RoleName) -> list[str]:
        """Names of the initializers with one of these roles."""
        return [entry.name for entry in self.entries if entry.role in roles]

    @property
    def trained(self) -> list[str]:
        """Parameters that the optimizer updates."""
        return self.of("trained")

    @property
    def frozen(self) -> list[str]:
        """Parameters that keep their value."""
        return self.of("frozen")

    @property
    def constants(self) -> list[str]:
        """Initializers that are not parameters and stay in the graph."""
        return self.of("constant")

    @property
    def state(self) -> list[str]:
        """Running means and variances of BatchNormalization, and buffers that `forward` changes."""
        return self.of("state")


def classify(model: onnx.ModelProto, patterns: ParameterPatterns, labels: Sequence[str]) -> Roles:
    """Determine the role of every initializer of a prepared model.

    Parameters
    ----------
    model
        The prepared model.
    patterns
        `model.parameters` of the run file.
    labels
        Names of its inputs that are labels.

    Raises
    ------
    UserError
        If a pattern matches nothing or selects a tensor that cannot be trained, if a parameter is not finite, or if
        there is nothing to train.
    """
    graph = model.graph
    consumers = walk.readers(graph)
    producers = {name: node for node in walk.with_branches(graph.node) for name in node.output if name}
    recorded_roles = _from_metadata(model)
    trains = any(role_heuristics.in_training(node) for node in graph.node)
    judged = [
        recorded_roles.get(tensor.name)
        or _judge(tensor, role_heuristics.uses(tensor.name, consumers), producers, labels, graph, trains)
        for tensor in graph.initializer
    ]
    judged = by_use(model, by_exporter(model, judged, consumers))
    roles = Roles(_apply_patterns(judged, patterns))
    _check(model, roles)
    _check_statistics(graph, roles)
    return roles


def _role(tensor: onnx.TensorProto, role: RoleName, reason: str, confidence: Confidence = "certain") -> Role:
    return Role(tensor.name, tuple(tensor.dims), role, reason, type_name(tensor.data_type), confidence)


def _judge(
    tensor: onnx.TensorProto,
    uses: list[tuple[onnx.NodeProto, int]],
    producers: dict[str, onnx.NodeProto],
    labels: Sequence[str],
    graph: onnx.GraphProto,
    trains: bool,
) -> Role:
    """Determine the role from position, name and values, in this order."""
    if any(role_heuristics.is_state(*use) for use in uses):
        if trains and not any(role_heuristics.is_state(*use) and role_heuristics.in_training(use[0]) for use in uses):
            return _role(tensor, "frozen", "running statistics in evaluation mode, while others are in training mode")
        return _role(tensor, "state", "running statistics")
    if tensor.data_type in _QUANTISED and any(role_heuristics.is_product(*use) for use in uses):
        raise UserError(
            f"weight {tensor.name!r} is {type_name(tensor.data_type).lower()}: the model is quantised",
            fix="train the float model it was made from",
        )
    if tensor.data_type != TensorProto.FLOAT:
        return _role(tensor, "constant", type_name(tensor.data_type).lower())
    if len(tensor.dims) == 0:
        return _role(tensor, "constant", ONE)
    if is_own(tensor.name):
        return _role(tensor, "constant", "written by ortflow in place of a node")
    if 0 in tensor.dims:
        return _role(tensor, "constant", "empty")
    name, shape = tensor.name, tuple(tensor.dims)
    values = numpy_helper.to_array(tensor)
    if role_heuristics.is_buffer_name(name):
        clear = role_heuristics.constant_pattern(values) not in (None, role_heuristics.SINES)
        return _role(tensor, "constant", "has a buffer's name", "certain" if clear else "likely")
    weight = next((node for node, place in uses if role_heuristics.is_weight(node, place)), None)
    if weight is None or weight.op_type in role_heuristics.TABLES:
        pattern = role_heuristics.constant_pattern(values)
        if pattern is not None and (weight is None or pattern == role_heuristics.SINES):
            likely = pattern == role_heuristics.SINES  # a trained table may start as one
            return _role(tensor, "constant", f"holds {pattern}", "likely" if likely else "certain")
    if weight is not None and weight.op_type in role_heuristics.TABLES:
        constants = {t.name for t in graph.initializer}
        # A table of positions is read at constant indices but trained, unless it was folded.
        made_up = is_made_up(name)
        if _indexed_by(weight, constants, producers):
            if made_up:
                return _role(tensor, "constant", "indexed by constants only", "guess")
        elif _indexed_by(weight, {*labels, *constants}, producers) and (made_up or len(shape) == 1):
            # Class weights of a loss. Rows of a matrix, in contrast, are trained parameters of the classes.
            return _role(tensor, "constant", "indexed by labels only", "certain" if made_up else "likely")
    if weight is not None and role_heuristics.is_placeholder(weight, name, values):
        return _role(tensor, "constant", f"all {values.flat[0]:g} in {weight.op_type} without parameters")
    if weight is not None:
        return _role(tensor, "trained", f"weight of {weight.op_type}")
    if any(role_heuristics.is_bias(node, place, shape, producers) for node, place in uses):
        return _role(tensor, "trained", "bias")
    if values.size == 1:
        return _role(tensor, "constant", ONE)
    open_use = next((node for node, place in uses if role_heuristics.is_open(node, place)), None)
    if open_use is not None and not is_made_up(name):
        return _role(tensor, "trained", f"operand of {open_use.op_type} with a name from the module")
    if open_use is not None and not values.any():
        # Such as a position bias that T5 makes in each layer. A weight has its module's name, or another place.
        return _role(tensor, "constant", f"zeros in {open_use.op_type} with a generated name", "likely")
    if open_use is not None:
        return _role(tensor, "constant", f"operand of {open_use.op_type} with a generated name", "guess")
    if not uses:
        return _role(tensor, "constant", "an output")
    return _role(tensor, "constant", f"argument of {uses[0][0].op_type}", "guess")


def _indexed_by(gather: onnx.NodeProto, names: Collection[str], producers: dict[str, onnx.NodeProto]) -> bool:
    index = onnx.helper.make_node("Identity", [gather.input[1]], [])
    return role_heuristics.only_from(names, index, producers)


def _from_metadata(model: onnx.ModelProto) -> dict[str, Role]:
    """Roles that the export function recorded in the model. Running statistics are state unless recorded as frozen."""
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    roles: dict[str, Role] = {}
    for key, names in recorded(model).items():
        for name in names:
            if name in tensors and tensors[name].data_type == TensorProto.FLOAT:
                roles[name] = _role(tensors[name], METADATA[key], RECORDED)
    consumers = walk.readers(model.graph)
    for name in [n for n in roles if any(role_heuristics.is_state(*use) for use in consumers.get(n, ()))]:
        if roles[name].role != "frozen":
            del roles[name]
    return roles


def _apply_patterns(judged: list[Role], patterns: ParameterPatterns) -> list[Role]:
    lists: tuple[tuple[str, list[str], RoleName], ...] = (
        ("train", patterns.train, "trained"),
        ("freeze", patterns.freeze, "frozen"),
        ("constant", patterns.constant, "constant"),
    )
    roles = {entry.name: entry for entry in judged}
    for key, globs, role in lists:
        for place, glob in enumerate(globs):
            key_path = f"model.parameters.{key}[{place}]"
            matched = matches(glob, roles, key_path, "initializer of the model")
            able = [name for name in matched if _unable(roles[name], role) is None]
            if not able:
                # A pattern for a part of the model may also match integers and statistics, but not only those.
                raise UserError(
                    f"{matched[0]!r} {_unable(roles[matched[0]], role)}", where=key_path, fix="narrow the pattern"
                )
            for name in able:
                roles[name] = replace(roles[name], role=role, reason=f"{key_path} says so", confidence="certain")
    return list(roles.values())


def _unable(entry: Role, role: RoleName) -> str | None:
    """Why an initializer cannot have a role; None if it can."""
    if role != "constant" and entry.dtype != "FLOAT":
        return f"is {entry.dtype.lower()}, which cannot be a parameter"
    if role != "frozen" and entry.role == "state":
        return "is state, which the forward pass updates itself"
    return None


def _check(model: onnx.ModelProto, roles: Roles) -> None:
    if not roles.trained:
        # `ortflow inspect` refuses the model as well, so that it cannot list them.
        names = [tensor.name for tensor in model.graph.initializer if tensor.data_type == TensorProto.FLOAT]
        rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        listed = f"it has {', '.join(names[:_SHOWN])}{rest}" if names else "it has none of floating-point numbers"
        raise UserError(
            "the model has no parameter to train",
            fix=f"name the initializers to train under `model.parameters.train`: {listed}",
        )
    learned = set(roles.of("trained", "frozen", "state"))
    for tensor in model.graph.initializer:
        if tensor.name in learned:
            flat = numpy_helper.to_array(tensor).reshape(-1)
            bad = flat.size - count_where(flat, np.isfinite)
            if bad:
                raise UserError(
                    f"parameter {tensor.name!r} holds {bad} non-finite value{'s' if bad > 1 else ''} of {flat.size}",
                    fix="export the model with finite weights, or name it under `model.parameters.constant`",
                )


def _check_statistics(graph: onnx.GraphProto, roles: Roles) -> None:
    """Check that each BatchNormalization has its running mean and variance either both frozen or both not."""
    for node in graph.node:
        if node.op_type == "BatchNormalization" and node.domain == "":
            mean, variance = node.input[3:5]
            frozen = [name for name in (mean, variance) if name in roles.frozen]
            if len(frozen) == 1:
                raise UserError(
                    f"{frozen[0]!r} is frozen, and the other of the two statistics of {walk.called(node)} is not",
                    where="model.parameters.freeze",
                    fix=f"freeze {mean!r} and {variance!r}, or neither",
                )
