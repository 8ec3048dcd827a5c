"""The run file's `train` section: how long, which optimizer, which schedule."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ortflow.workflow.spec.base import Count, Fraction, NonNegativeFloat, Positive, PositiveFloat, Section, Text
from ortflow.workflow.spec.metrics import Watched


class OptimizerBase(Section):
    """What all optimizers share."""

    name: str
    """The update rule."""
    lr: PositiveFloat
    """Learning rate at the schedule's peak."""
    weight_decay: NonNegativeFloat = 0.0
    """Decay of the parameters that are not excluded."""
    no_decay: list[Text] | None = None
    """Glob patterns of parameters without decay; by default biases, and all of one axis or none (norms)."""


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
    """Share of the last update that is kept."""
    nesterov: bool = False
    """Look-ahead momentum."""


Optimizer = Annotated[Adam | Lamb | Sgd, Field(discriminator="name")]


class Schedule(Section):
    """The learning rate over the steps: a linear warm-up, then `name`."""

    name: Literal["constant", "linear", "polynomial", "cosine"] = "constant"
    """Shape after the warm-up."""
    warmup_steps: Count = 0
    """Steps over which the rate rises from 0."""
    final_fraction: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.0
    """Rate at the last step, as a share of the peak (linear, polynomial, cosine)."""
    power: PositiveFloat = 2.0
    """Exponent of the polynomial."""


class Evaluation(Section):
    """When the evaluation set is run; it is also run after the last step."""

    every_steps: Positive | None = None
    """Period in steps; only at the end if not given."""


class EarlyStop(Section):
    """Stop when a metric no longer improves."""

    metric: Watched = "loss"
    """Evaluation metric that is watched."""
    patience: Positive = 3
    """Evaluations without improvement before the run stops."""
    min_delta: NonNegativeFloat = 0.0
    """Smallest change that counts as an improvement."""


class TrainSection(Section):
    """How the parameters are learned."""

    steps: Positive | None = None
    """Optimizer steps; give this or `epochs`."""
    epochs: Positive | None = None
    """Passes over the training set."""
    optimizer: Optimizer
    """The update rule."""
    schedule: Schedule = Schedule.model_construct()
    """The learning rate over the steps."""
    global_batch: Positive | None = None
    """Samples of an optimizer step over all ranks, from which gradient_accumulation follows. A run that goes on keeps
    the value it began with; another one given here changes it."""
    gradient_accumulation: Positive = 1
    """Micro-batches a rank adds up before an optimizer step, where global_batch does not say it."""
    clip_norm: PositiveFloat | None = None
    """Largest L2 norm of the gradient; larger ones are scaled down."""
    evaluation: Evaluation = Evaluation.model_construct()
    """Periodic evaluation."""
    early_stop: EarlyStop | None = None
    """Stop when a metric no longer improves."""
    max_skipped_steps: Positive = 10
    """Steps in a row with a non-finite loss or gradient that end the run."""
    precision: Literal["fp32", "tf32", "fp16", "bf16"] = "fp32"
    """What training computes with. On GPUs alone: tf32, which rounds the factors of products to 10 bits; fp16 and bf16,
    which products and large values are stored in. Parameters, moments, sums and statistics stay fp32."""
    loss_scale: Literal["dynamic"] | PositiveFloat = "dynamic"
    """What gradients are multiplied by in fp16: halved when they overflow and doubled after 2,000 steps without, or a
    number."""
    check_gradient: bool = True
    """Check the gradient on a micro-batch before the first step: against ONNX Runtime's own operators and against
    differences of the loss. A check that has passed is not repeated for the same graphs, kernels and runtime."""
