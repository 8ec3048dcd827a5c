"""Signs that an exporter changed the model so that training it would not train what the user wrote.

Called by `source`, which refuses such a model, and by `inspect`. Torch's exporters are made for inference: with their
defaults they merge parameters that happen to be equal, fold others into constants and BatchNormalization into
convolutions, and the graph still computes the same.
"""

from __future__ import annotations

import onnx

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.roles.decide import METADATA, Roles
from ortflow.workflow.graph.roles.lost import folded_norms, folded_scales, is_folded_name, lost_parameters
from ortflow.workflow.graph.roles.merged import merged_parameters

ACCEPT = "model.accept_inference_export"
"""The key of the run file that trains such a model all the same."""
_TOLD = 3
"""Signs of one kind that a sentence names."""


def find_export_warnings(model: onnx.ModelProto, roles: Roles) -> list[str]:
    """A sentence for each sign in a prepared model; empty for a model that export_for_training wrote."""
    if any(prop.key in METADATA for prop in model.metadata_props):
        return []
    return [
        *merged_parameters(model, roles),
        *folded_norms(model),
        *folded_scales(model, roles),
        *lost_parameters(model, roles),
    ]


def refusal(export_warnings: list[str], where: str) -> UserError:
    """What to raise where a model that shows signs is to be trained."""
    more = (
        f"; and {len(export_warnings) - _TOLD} more signs (`ortflow inspect` lists them)"
        if len(export_warnings) > _TOLD
        else ""
    )
    return UserError(
        f"the model was exported for inference and would train differently from the module: "
        f"{'; '.join(export_warnings[:_TOLD])}{more}",
        where=where,
        fix=f"export it again with ortflow.export_for_training, or set {ACCEPT}: true to train it unchanged",
    )


def renamed_weights(model: onnx.ModelProto, roles: Roles) -> list[str]:
    """A sentence where trained weights have lost their names: they train right, but no pattern finds them."""
    if any(prop.key in METADATA for prop in model.metadata_props):
        return []
    names = [role.name for role in roles if role.role == "trained" and is_folded_name(role.name)]
    if not names:
        return []
    return [
        f"{len(names)} trained weight{'s' if len(names) > 1 else ''}, such as {names[0]!r}, lost their names "
        f"from the module in the export; ortflow.export_for_training keeps names"
    ]
