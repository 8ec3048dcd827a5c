"""The run file's groups of parameters that are trained differently from the others."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ortflow.workflow.spec.base import NonNegativeFloat, PositiveFloat, Section, Text


class ParameterGroup(Section):
    """Parameters with settings of their own; what is not given is as for all others."""

    match: Annotated[list[Text], Field(min_length=1)]
    """Glob patterns of trained parameters, such as `head.*`. No parameter is in two groups."""
    lr: PositiveFloat | None = None
    """Learning rate at the schedule's peak, in place of `train.optimizer.lr`."""
    lr_scale: PositiveFloat | None = None
    """Factor of the learning rate; or give `lr`."""
    weight_decay: NonNegativeFloat | None = None
    """Decay of those parameters of the group that are not excluded by `no_decay`."""
    frozen_until: Text | None = None
    """Duration during which the group stays as it is, such as `2 epochs`: no update, no decay, no part in the norm of
    the gradient. Then its first update is the first of its optimizer."""


class LayerDecay(Section):
    """Learning rates that fall from the last layer to the first."""

    factor: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
    """Learning rate of a layer as a multiple of that of the next one; the last has the whole rate."""
    layers: Annotated[list[Text], Field(min_length=2)]
    """Glob patterns of the layers' parameters, from the first to the last. `{0-11}` in a pattern stands for twelve
    layers with these numbers. Each trained parameter is in one layer."""
