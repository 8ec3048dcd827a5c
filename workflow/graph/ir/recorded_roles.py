"""What `export_for_training` records about the roles of a model's tensors. Pure."""

from __future__ import annotations

import json

import onnx

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.head import PARAMETERS

FROZEN, CONSTANTS, STATE = "ortflow.frozen", "ortflow.constants", "ortflow.state"
PROPERTIES = (PARAMETERS, FROZEN, CONSTANTS, STATE)
"""Properties of the model: JSON lists of names of tensors."""
EVALUATION = "ortflow.evaluation"
"""Property of a model with an evaluation form: the JSON list of its outputs."""


def recorded(model: onnx.ModelProto) -> dict[str, list[str]]:
    """What `export_for_training` wrote about tensors: property -> names. Raises UserError if it is damaged."""
    names_by_key: dict[str, list[str]] = {}
    for prop in model.metadata_props:
        if prop.key not in (*PROPERTIES, EVALUATION):
            continue
        try:
            names = json.loads(prop.value)
        except (ValueError, RecursionError):
            names = None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise UserError(f"the model's property {prop.key!r} is not a list of names", fix="export the model again")
        names_by_key.setdefault(prop.key, []).extend(names)
    return names_by_key
