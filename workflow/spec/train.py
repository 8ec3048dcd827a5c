"""The run file's `train` section: how long, which optimizer, which schedule."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ortflow.workflow.spec.averages import BUFFER, Average
from ortflow.workflow.spec.base import NonNegativeFloat, Positive, PositiveFloat, Section, Text, no_items
from ortflow.workflow.spec.groups import LayerDecay, ParameterGroup
from ortflow.workflow.spec.optimizers import Optimizer, moments
from ortflow.workflow.spec.schedules import Schedule

HALF_PRECISIONS = ("fp16", "bf16")
"""Values of `train.precision` that store numbers in 16 bits."""


class Evaluation(Section):
    """When to evaluate; evaluation also runs after the last step."""

    every_steps: Positive | None = None
    """Period in steps; only at the end if not given."""


class EarlyStop(Section):
    """Stop when a metric no longer improves."""

    metric: Text = "loss"
    """Result of the evaluation to compare: loss, or a metric of `model.metrics` by its name in the results."""
    patience: Positive = 3
    """Evaluations without improvement before the run stops."""
    min_delta: NonNegativeFloat = 0.0
    """Smallest change that counts as an improvement."""


class TrainSection(Section):
    """How the parameters are trained."""

    steps: Positive | None = None
    """Optimizer steps; give this or `epochs`."""
    epochs: Positive | None = None
    """Passes over the training set."""
    optimizer: Optimizer
    """The update rule."""
    schedule: Schedule = Schedule.model_construct()
    """The learning rate over the steps."""
    groups: list[ParameterGroup] = Field(default_factory=no_items)
    """Parameters with another learning rate or weight decay, or that are frozen at first."""
    layer_decay: LayerDecay | None = None
    """Learning rates that fall from the last layer to the first."""
    average: Average | None = None
    """Averaged weights, which are evaluated and exported in place of the trained ones."""
    global_batch: Positive | None = None
    """Samples of an optimizer step over all ranks, which determines gradient_accumulation. A resumed
    run keeps its first value unless another one is set here."""
    gradient_accumulation: Positive = 1
    """Micro-batches a replica (by default a rank) adds up before an optimizer step, if global_batch is not given."""
    clip_norm: PositiveFloat | None = None
    """Largest L2 norm of the gradient; larger ones are scaled down."""
    evaluation: Evaluation = Evaluation.model_construct()
    """Periodic evaluation."""
    early_stop: EarlyStop | None = None
    """Stop when a metric no longer improves."""
    sync_batch_norm: bool = False
    """Whether BatchNormalization's statistics run over the micro-batches of all ranks, as in PyTorch's SyncBatchNorm;
    otherwise they are those of each rank's micro-batch."""
    max_skipped_steps: Positive = 10
    """Steps in a row with a non-finite loss or gradient that end the run."""
    precision: Literal["fp32", "tf32", "fp16", "bf16"] = "fp32"
    """Number format of training. On GPUs only: tf32, which rounds the factors of products to 10 bits; fp16 and bf16,
    in which products and large values are stored. Parameters, moments, sums and statistics stay fp32."""
    loss_scale: Literal["dynamic"] | PositiveFloat = "dynamic"
    """Factor of the gradients in fp16: dynamic (halved after an overflow and doubled after 2,000 steps without one), or
    a number."""
    offload: Literal["none", "optimizer"] = "none"
    """On GPUs: optimizer stores the optimizer's moments in pinned host memory, from which they pass through the GPU in
    each update. This takes less of its memory and more time; results are bit-identical."""
    check_gradient: bool = True
    """Check the gradient on a micro-batch before the first step, against ONNX Runtime's operators and against finite
    differences of the loss. A passed check is not repeated for the same graphs, kernels and runtime."""

    @property
    def buffers(self) -> tuple[str, ...]:
        """Names of the flat buffers beside the parameters: the optimizer's moments, and the average of the weights."""
        return (*moments(self.optimizer), *(() if self.average is None else (BUFFER,)))
