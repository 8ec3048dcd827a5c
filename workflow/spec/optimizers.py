"""The optimizers: the keys of each in the run file, and one table of their properties.

Read by the run file's checks, the optimizer graph, the trainer, the memory forecast and the documentation. A new
optimizer is a section, its class in `Optimizer`, an entry in `OPTIMIZERS` and its nodes in `ortflow.workflow.optim`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from ortflow.workflow.spec.base import Fraction, NonNegativeFloat, PositiveFloat, Section, Text


class OptimizerBase(Section):
    """Keys that all optimizers share."""

    name: str
    """The update rule."""
    lr: PositiveFloat
    """Learning rate at the schedule's peak."""
    weight_decay: NonNegativeFloat = 0.0
    """Decay of the parameters that are not excluded."""
    no_decay: list[Text] | None = None
    """Glob patterns of parameters without decay; by default biases, and all with at most one axis (norms)."""


class Adam(OptimizerBase):
    """Adam (Kingma & Ba 2015), its weight decay added to the gradient; AdamW (Loshchilov & Hutter 2019), decoupled."""

    name: Literal["adam", "adamw"]
    """The update rule."""
    betas: tuple[Fraction, Fraction] = Field(default=(0.9, 0.999), strict=False)
    """Decay rates of the first and second moment."""
    epsilon: PositiveFloat = 1e-8
    """Added to the root of the second moment."""


class Lamb(OptimizerBase):
    """LAMB (You et al. 2020): Adam's update scaled by each layer's trust ratio."""

    name: Literal["lamb"]
    """The update rule."""
    betas: tuple[Fraction, Fraction] = Field(default=(0.9, 0.999), strict=False)
    """Decay rates of the first and second moment."""
    epsilon: PositiveFloat = 1e-6
    """Added to the root of the second moment."""


class Sgd(OptimizerBase):
    """Stochastic gradient descent with momentum, as torch.optim.SGD defines it."""

    name: Literal["sgd"]
    """The update rule."""
    momentum: Fraction = 0.0
    """Factor of the previous update."""
    nesterov: bool = False
    """Use Nesterov momentum."""


Optimizer = Annotated[Adam | Lamb | Sgd, Field(discriminator="name")]


@dataclass(frozen=True)
class Properties:
    """Properties of an update rule."""

    moments: Mapping[str, str | None]
    """Each value stored per trained parameter, 0 at first, and the key that must not be 0 for it (None: always)."""
    whole_tensors: bool = False
    """Whether an update depends on a whole parameter tensor rather than on single elements."""


_ADAM_MOMENTS = {"moment_1": None, "moment_2": None}
OPTIMIZERS: dict[str, Properties] = {
    "adam": Properties(moments=_ADAM_MOMENTS),
    "adamw": Properties(moments=_ADAM_MOMENTS),
    "lamb": Properties(moments=_ADAM_MOMENTS, whole_tensors=True),
    "sgd": Properties(moments={"momentum": "momentum"}),
}
"""`train.optimizer.name` -> properties."""


def moments(optimizer: Optimizer) -> tuple[str, ...]:
    """Names of the flat buffers that `optimizer` keeps beside the parameters."""
    kept = OPTIMIZERS[optimizer.name].moments
    return tuple(name for name, key in kept.items() if key is None or getattr(optimizer, key))


def moment_counts() -> str:
    """How many moments each optimizer keeps per parameter, in one line."""
    return ", ".join(f"{name} {_count(known)}" for name, known in OPTIMIZERS.items())


def _count(known: Properties) -> str:
    needed = [key for key in known.moments.values() if key is not None]
    condition = f" if {' and '.join(needed)} is not 0" if needed else ""
    return f"{len(known.moments)}{condition}"
