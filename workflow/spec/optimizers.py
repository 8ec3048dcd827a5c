"""The optimizers: the keys of each in the run file, and one table of their properties.

Read by the run file's checks, the optimizer graph, the trainer, the memory forecast and the documentation. A new
optimizer is a section, its class in `Optimizer`, an entry in `OPTIMIZERS` and its nodes in `ortflow.workflow.optim`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Literal

from pydantic import Field

from ortflow.workflow.spec.base import Fraction, NonNegativeFloat, PositiveFloat, Section, Text, no_items


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
    # YAML has lists alone, which strict mode refuses for a tuple (pydantic 2.14).
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


class Lion(OptimizerBase):
    """Lion (Chen et al. 2023): the sign of a moving average; decoupled weight decay."""

    name: Literal["lion"]
    """The update rule."""
    betas: tuple[Fraction, Fraction] = Field(default=(0.9, 0.99), strict=False)
    """Decay rate of the moment in the update, and of the moment that is stored; the second is above 0."""


class RmsProp(OptimizerBase):
    """RMSprop (Tieleman & Hinton 2012), as torch.optim.RMSprop defines it."""

    name: Literal["rmsprop"]
    """The update rule."""
    alpha: Fraction = 0.99
    """Decay rate of the mean square of the gradient."""
    epsilon: PositiveFloat = 1e-8
    """Added to the root of the mean square."""
    momentum: Fraction = 0.0
    """Factor of the previous update."""
    centered: bool = False
    """Divide by the gradient's standard deviation in place of its root mean square."""


class Adagrad(OptimizerBase):
    """Adagrad (Duchi et al. 2011), as torch.optim.Adagrad defines it."""

    name: Literal["adagrad"]
    """The update rule."""
    epsilon: PositiveFloat = 1e-10
    """Added to the root of the sum of squares."""
    initial_sum: NonNegativeFloat = 0.0
    """The sum of squares before the first step (torch.optim's initial_accumulator_value)."""


class NAdam(OptimizerBase):
    """NAdam (Dozat 2016): Adam with Nesterov momentum, as torch.optim.NAdam defines it."""

    name: Literal["nadam"]
    """The update rule."""
    betas: tuple[Fraction, Fraction] = Field(default=(0.9, 0.999), strict=False)
    """Decay rates of the first and second moment."""
    epsilon: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    momentum_decay: NonNegativeFloat = 4e-3
    """How fast the momentum rises to the first of `betas` over the steps."""
    decoupled_weight_decay: bool = False
    """Decay the weights themselves, as AdamW does, in place of adding the decay to the gradient."""


class RAdam(OptimizerBase):
    """RAdam (Liu et al. 2020): Adam with a rectified rate in the first steps, as torch.optim.RAdam defines it."""

    name: Literal["radam"]
    """The update rule."""
    betas: tuple[Fraction, Fraction] = Field(default=(0.9, 0.999), strict=False)
    """Decay rates of the first and second moment."""
    epsilon: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    decoupled_weight_decay: bool = False
    """Decay the weights themselves, as AdamW does, in place of adding the decay to the gradient."""


class Adafactor(OptimizerBase):
    """Adafactor (Shazeer & Stern 2018), as torch.optim.Adafactor defines it."""

    name: Literal["adafactor"]
    """The update rule."""
    lr: PositiveFloat
    """Largest relative step at the schedule's peak; that of step t is at most 1 / sqrt(t)."""
    beta2_decay: Annotated[float, Field(le=0, allow_inf_nan=False)] = -0.8
    """Exponent of the step that gives the weight of the new squares in their average."""
    # torch.optim.Adafactor's defaults: None stands there for the epsilon of the type, 2^-23 for float32.
    epsilon: tuple[PositiveFloat, NonNegativeFloat] = Field(default=(2.0**-23, 1e-3), strict=False)
    """Smallest root of the mean square of a gradient, and of a parameter in the size of its step."""
    clip_threshold: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    """Root mean square of an update above which it is scaled down."""


class Muon(OptimizerBase):
    """Muon (Jordan et al. 2024): orthogonalized momentum for matrices, and AdamW for all other parameters."""

    name: Literal["muon"]
    """The update rule."""
    lr: PositiveFloat
    """Learning rate of matrices at the schedule's peak; such as 0.02."""
    momentum: Fraction = 0.95
    """Factor of the previous momentum."""
    nesterov: bool = True
    """Use Nesterov momentum."""
    adamw: list[Text] = Field(default_factory=no_items)
    """Glob patterns of matrices that AdamW updates, as is usual for embeddings and the last layer; it updates all
    parameters with less than two axes anyway."""
    adamw_lr: PositiveFloat = 3e-4
    """Learning rate of AdamW at the schedule's peak."""
    betas: tuple[Fraction, Fraction] = Field(default=(0.9, 0.95), strict=False)
    """AdamW's decay rates of the first and second moment."""
    epsilon: PositiveFloat = 1e-10
    """Added to the root of AdamW's second moment."""

    def has(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether Muon updates a parameter, and not AdamW."""
        return len(shape) >= 2 and not any(fnmatchcase(name, pattern) for pattern in self.adamw)


Optimizer = Annotated[
    Adam | Lamb | Sgd | Lion | RmsProp | Adagrad | NAdam | RAdam | Adafactor | Muon,
    Field(discriminator="name"),
]


@dataclass(frozen=True)
class Properties:
    """Properties of an update rule."""

    moments: Mapping[str, str | None]
    """Each value stored per trained parameter, 0 at first, and the key that it needs, other than 0 (None: always)."""
    whole_tensors: bool = False
    """Whether an update depends on a whole parameter tensor rather than on single elements."""
    shapes: bool = False
    """Whether it depends on the tensor's shape too, so that no rank may have only a piece of it."""


_ADAM_MOMENTS = {"moment_1": None, "moment_2": None}
OPTIMIZERS: dict[str, Properties] = {
    "adam": Properties(moments=_ADAM_MOMENTS),
    "adamw": Properties(moments=_ADAM_MOMENTS),
    "lamb": Properties(moments=_ADAM_MOMENTS, whole_tensors=True),
    "sgd": Properties(moments={"momentum": "momentum"}),
    "lion": Properties(moments={"moment": None}),
    "rmsprop": Properties(
        moments={"square_average": None, "gradient_average": "centered", "momentum": "momentum"},
    ),
    "adagrad": Properties(moments={"square_sum": None}),
    "nadam": Properties(moments=_ADAM_MOMENTS),
    "radam": Properties(moments=_ADAM_MOMENTS),
    "adafactor": Properties(moments={"square_average": None}, whole_tensors=True, shapes=True),
    "muon": Properties(moments=_ADAM_MOMENTS, whole_tensors=True, shapes=True),
}
"""`train.optimizer.name` -> properties."""


def moments(optimizer: Optimizer) -> tuple[str, ...]:
    """Names of the flat buffers that `optimizer` keeps beside the parameters."""
    moment_keys = OPTIMIZERS[optimizer.name].moments
    return tuple(name for name, key in moment_keys.items() if key is None or getattr(optimizer, key))


def moment_counts() -> str:
    """How many moments each optimizer keeps per parameter, in one line."""
    return ", ".join(f"{name} {_count(properties)}" for name, properties in OPTIMIZERS.items())


def _count(properties: Properties) -> str:
    condition_keys = [key for key in properties.moments.values() if key is not None]
    always = len(properties.moments) - len(condition_keys)
    if always and condition_keys:
        return f"{always}, and one more each with {' and '.join(condition_keys)}"
    condition = f" if {' and '.join(condition_keys)} is not 0" if condition_keys else ""
    return f"{len(properties.moments)}{condition}"
