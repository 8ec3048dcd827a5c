"""Reports what ortflow finds in a model file: inputs and outputs, parameters and why, obstacles to training.

Called by `ortflow inspect` and `ortflow validate`. Builds no gradient and opens no session.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import onnx

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.autodiff.expand import undifferentiable
from ortflow.workflow.graph.file.read import read_model
from ortflow.workflow.graph.file.tensors import type_name
from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.ir.recorded_forms import Forms, separate
from ortflow.workflow.graph.normalize.dropouts import dropout_notes
from ortflow.workflow.graph.normalize.opset import opset_of
from ortflow.workflow.graph.normalize.prepare import prepare
from ortflow.workflow.graph.roles.decide import Role, Roles, classify
from ortflow.workflow.graph.roles.export_warnings import find_export_warnings, renamed_weights
from ortflow.workflow.graph.roles.guesses import judged_constants
from ortflow.workflow.graph.roles.made_weights import store_made_weights
from ortflow.workflow.memory import buffers
from ortflow.workflow.spec.model import ParameterPatterns
from ortflow.workflow.spec.optimizers import OPTIMIZERS


@dataclass(frozen=True)
class Value:
    """An input or output; dims are numbers, names of dynamic axes, or None."""

    name: str
    dtype: str
    shape: list[int | str | None] | None


@dataclass(frozen=True)
class Report:
    """The result of `findings`."""

    path: str
    opset: int
    ir_version: int
    producer: str
    inputs: list[Value]
    outputs: list[Value]
    parameters: int
    """Number of elements of the trained parameters."""
    trained: list[Role]
    frozen: list[Role]
    constants: list[Role]
    state: list[Role]
    tied: dict[str, list[str]]
    """Parameter -> the nodes that read it, if there are several."""
    notes: list[str]
    """What ortflow changes before it trains the model."""
    export_warnings: list[str]
    """Signs of an export for inference, which would train differently."""
    warnings: list[str]
    """Warnings: tensors assumed to be constants, weights that lost their names."""
    undifferentiable: list[str]
    """Nodes between the parameters and the outputs that have no gradient."""
    memory: dict[str, int]
    """Bytes that a rank allocates with AdamW, by part, without the graph's values, whose size depends on the batch."""

    def to_json(self) -> dict[str, Any]:
        """The report as JSON-serialisable data."""
        return asdict(self)


def findings(
    path: Path,
    patterns: ParameterPatterns | None = None,
    labels: Sequence[str] = (),
    outputs: Sequence[str] = (),
) -> Report:
    """Read and analyse a model file.

    Parameters
    ----------
    path
        The model file.
    patterns, labels
        `model.parameters` and the label inputs of the run file.
    outputs
        Outputs that the loss depends on; all if None.

    Raises
    ------
    UserError
        If the model cannot be read or prepared, or has nothing to train.
    """
    original = read_model(path)
    model, notes = prepare(original, str(path))
    patterns = patterns or ParameterPatterns()
    forms = separate(model)
    stored_notes, unstored = store_made_weights(model, patterns)
    try:
        roles = classify(model, patterns, labels)
    except UserError as error:
        raise UserError(error.what, where=error.where or str(path), fix=error.fix) from None
    losses = list(outputs) or [value.name for value in model.graph.output]
    return Report(
        path=str(path),
        opset=opset_of(original),
        ir_version=original.ir_version,
        producer=f"{original.producer_name} {original.producer_version}".strip(),
        inputs=[_value(v) for v in model.graph.input],
        outputs=[_value(v) for v in model.graph.output],
        parameters=sum(role.count for role in roles if role.role == "trained"),
        trained=[role for role in roles if role.role == "trained"],
        frozen=[role for role in roles if role.role == "frozen"],
        constants=[role for role in roles if role.role == "constant"],
        state=[role for role in roles if role.role == "state"],
        tied=_tied(model, roles),
        notes=[*notes, *stored_notes, *_form_notes(forms), *dropout_notes(model.graph)],
        export_warnings=find_export_warnings(model, roles),
        warnings=[*renamed_weights(model, roles), *unstored, *judged_constants(roles)],
        undifferentiable=undifferentiable(model, roles.trained, losses),
        memory=buffers(
            sum(role.count for role in roles if role.role == "trained"),
            sum(role.count for role in roles if role.role in ("frozen", "state")),
            len(OPTIMIZERS["adamw"].moments),
        ),
    )


def _form_notes(forms: Forms) -> list[str]:
    """What is evaluated and exported, if that is not what is trained."""
    if forms.evaluation is None:
        return []
    outputs = ", ".join(value.name for value in forms.evaluation.graph.output)
    return [f"evaluated and exported as in the module's evaluation mode, with the outputs {outputs}"]


def _value(value: onnx.ValueInfoProto) -> Value:
    tensor = value.type.tensor_type
    shape: list[int | str | None] | None = None
    if tensor.HasField("shape"):
        shape = [d.dim_value if d.HasField("dim_value") else (d.dim_param or None) for d in tensor.shape.dim]
    return Value(value.name, type_name(tensor.elem_type).lower(), shape)


def _tied(model: onnx.ModelProto, roles: Roles) -> dict[str, list[str]]:
    consumers = walk.readers(model.graph)
    readers = {name: consumers.get(name, []) for name in roles.of("trained", "frozen")}
    return {name: [node.name for node, _ in uses] for name, uses in readers.items() if len(uses) > 1}
