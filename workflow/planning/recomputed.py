"""Layouts that do not fit their memory, with their layers recomputed. For `ortflow plan`."""

from __future__ import annotations

from dataclasses import replace

from ortflow.workflow.errors import UserError
from ortflow.workflow.planning.preference import ordered
from ortflow.workflow.planning.survey import Survey, survey
from ortflow.workflow.spec.run import TrainerRunSpec

LAYERS = "layers"
"""Value of `model.recompute`."""


def with_recomputation(own_survey: Survey, memory: float) -> Survey:
    """Add to a survey what its layouts need with `model.recompute: layers`, if they need more than `memory` without.

    Parameters
    ----------
    own_survey
        A survey of the run file's own `model.recompute`.
    memory
        Bytes of a rank.

    Returns
    -------
    Survey
        The same if all layouts fit, or the run file sets `model.recompute`, or the model repeats no layers; a note then
        gives the reason.
    """
    model = own_survey.spec.onnx_model
    large = {candidate.layout for candidate in own_survey.candidates if candidate.memory.total > memory}
    if not large or model.recompute or model.graphs.train:
        return own_survey
    try:
        other = survey(recomputing(own_survey.spec), lambda *_: own_survey.rates)
    except UserError as error:
        return replace(
            own_survey, notes=(*own_survey.notes, f"model.recompute: layers is not considered: {error.what}")
        )
    recomputed_candidates = [
        replace(candidate, recompute=LAYERS) for candidate in other.candidates if candidate.layout in large
    ]
    return replace(own_survey, candidates=ordered([*own_survey.candidates, *recomputed_candidates]))


def recomputing(spec: TrainerRunSpec) -> TrainerRunSpec:
    """The run with its layers recomputed."""
    model = spec.onnx_model.model_copy(update={"recompute": LAYERS})
    return spec.model_copy(update={"model": model})
