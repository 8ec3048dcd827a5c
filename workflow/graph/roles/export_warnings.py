"""Signs that an exporter changed the model in a way that training would differ from training the original module.

Called by `source`, which rejects such a model, and by `inspect`. PyTorch's exporters are made for inference: by default
they merge parameters that happen to be equal, and fold others into constants and BatchNormalization into convolutions.
The graph's outputs do not change.
"""

from __future__ import annotations

import onnx

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.roles.decide import METADATA, Roles
from ortflow.workflow.graph.roles.lost import folded_norms, folded_scales, is_folded_name, lost_parameters
from ortflow.workflow.graph.roles.merged import merged_parameters

ACCEPT = "model.accept_inference_export"
"""The key of the run file that allows such a model."""
_LISTED = 3
"""Number of signs that a sentence lists."""


def find_export_warnings(model: onnx.ModelProto, roles: Roles) -> list[str]:
    """One sentence for each sign in a prepared model; empty for a model that export_for_training wrote."""
    if any(prop.key in METADATA for prop in model.metadata_props):
        return []
    return [
        *merged_parameters(model, roles),
        *folded_norms(model),
        *folded_scales(model, roles),
        *lost_parameters(model, roles),
    ]


def refusal(export_warnings: list[str], location: str) -> UserError:
    """The error to raise if a model with such signs is to be trained."""
    rest = (
        f"; and {len(export_warnings) - _LISTED} more signs (`ortflow inspect` lists them)"
        if len(export_warnings) > _LISTED
        else ""
    )
    return UserError(
        f"the model was exported for inference and would train differently from the module: "
        f"{'; '.join(export_warnings[:_LISTED])}{rest}",
        where=location,
        fix=f"export it again with ortflow.export_for_training, or set {ACCEPT}: true to train it unchanged",
    )


def renamed_weights(model: onnx.ModelProto, roles: Roles) -> list[str]:
    """One sentence if trained weights have lost their names: they train correctly, but patterns cannot select them."""
    if any(prop.key in METADATA for prop in model.metadata_props):
        return []
    names = [role.name for role in roles if role.role == "trained" and is_folded_name(role.name)]
    if not names:
        return []
    return [
        f"{len(names)} trained weight{'s' if len(names) > 1 else ''}, such as {names[0]!r}, lost their names "
        f"from the module in the export; ortflow.export_for_training keeps names"
    ]
