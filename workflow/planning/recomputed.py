"""Layouts that do not fit their memory, with their layers recomputed. For `ortflow plan`."""

from __future__ import annotations

from dataclasses import replace

from ortflow.workflow.errors import UserError
from ortflow.workflow.planning.preference import ordered
from ortflow.workflow.planning.survey import Survey, survey
from ortflow.workflow.spec.run import TrainerRunSpec

LAYERS = "layers"
"""Value of `model.recompute`."""


def with_recomputation(found: Survey, memory: float) -> Survey:
    """Add to a survey what its layouts need with `model.recompute: layers`, if they need more than `memory` without.

    Parameters
    ----------
    found
        A survey of the run file's own `model.recompute`.
    memory
        Bytes of a rank.

    Returns
    -------
    Survey
        The same if all layouts fit, or the run file sets `model.recompute`, or the model repeats no layers; a note then
        gives the reason.
    """
    model = found.spec.onnx_model
    large = {each.layout for each in found.found if each.memory.total > memory}
    if not large or model.recompute or model.graphs.train:
        return found
    try:
        other = survey(recomputing(found.spec), lambda *_: found.rates)
    except UserError as error:
        return replace(found, notes=(*found.notes, f"model.recompute: layers is not considered: {error.what}"))
    more = [replace(each, recompute=LAYERS) for each in other.found if each.layout in large]
    return replace(found, found=ordered([*found.found, *more]))


def recomputing(spec: TrainerRunSpec) -> TrainerRunSpec:
    """The run with its layers recomputed."""
    model = spec.onnx_model.model_copy(update={"recompute": LAYERS})
    return spec.model_copy(update={"model": model})
