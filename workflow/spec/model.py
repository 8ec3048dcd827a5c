"""The run file's `model` section: the graph, what of it is trained, its loss and its metrics."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ortflow.workflow.spec.base import Count, Positive, PositiveFloat, Section, Text, no_items, no_keys
from ortflow.workflow.spec.losses import (
    BinaryCrossEntropy,
    BinaryDice,
    BinaryFocal,
    CrossEntropy,
    Ctc,
    Dice,
    Divergence,
    Focal,
    Hinge,
    Huber,
    InfoNce,
    MultiMargin,
    OutputLoss,
    Poisson,
    Quantile,
    Regression,
    SmoothL1,
    Triplet,
)
from ortflow.workflow.spec.metrics import MetricSection


class UserGraphs(Section):
    """Custom graphs that replace those built from `path`."""

    train: Text | None = None
    """Training graph: outputs the loss and `<parameter>_grad` for each trained parameter."""
    eval: Text | None = None
    """Evaluation graph: outputs the loss and the metrics."""
    optimizer: Text | None = None
    """Optimizer graph over one flat segment."""


class ParameterPatterns(Section):
    """Glob patterns for initializer names, which override ortflow's classification; a later list overrides an earlier
    one."""

    train: list[Text] = Field(default_factory=no_items)
    """Initializers to train although ortflow classifies them as constants."""
    freeze: list[Text] = Field(default_factory=no_items)
    """Parameters, and running statistics of BatchNormalization, that are not updated."""
    constant: list[Text] = Field(default_factory=no_items)
    """Initializers that are not parameters: rotary tables, masks, shapes."""


SingleLoss = (
    CrossEntropy
    | Focal
    | MultiMargin
    | Dice
    | Regression
    | Huber
    | SmoothL1
    | Poisson
    | Quantile
    | BinaryCrossEntropy
    | BinaryFocal
    | Hinge
    | BinaryDice
    | Divergence
    | Ctc
    | InfoNce
    | Triplet
    | OutputLoss
)


class Term(Section):
    """One loss of a sum."""

    weight: PositiveFloat = 1.0
    """Factor of the loss."""
    loss: Annotated[SingleLoss, Field(discriminator="kind")]
    """The loss, with its `output` and `label`."""


class WeightedSum(Section):
    """A weighted sum of losses, each the mean that it is alone."""

    kind: Literal["sum"]
    """Kind of loss."""
    terms: Annotated[list[Term], Field(min_length=1)]
    """The losses, such as `{weight: 0.5, loss: {kind: mse, output: boxes, label: truth}}`."""

    @property
    def names(self) -> list[str]:
        """The name of each term in the results of an evaluation: its kind, with its place if another has the same."""
        kinds = [term.loss.kind for term in self.terms]
        return [f"{kind}.{place}" if kinds.count(kind) > 1 else kind for place, kind in enumerate(kinds)]


Loss = Annotated[SingleLoss | WeightedSum, Field(discriminator="kind")]


def single_losses(loss: SingleLoss | WeightedSum) -> dict[str, SingleLoss]:
    """Each loss by its key path: the loss itself, or those of a sum."""
    if isinstance(loss, WeightedSum):
        return {f"model.loss.terms[{place}].loss": term.loss for place, term in enumerate(loss.terms)}
    return {"model.loss": loss}


class StartFrom(Section):
    """Weights that the run starts with, in place of the model file's."""

    path: Text
    """A run directory, a folder of checkpoints or one of them, an ONNX model, a safetensors file, a file of
    `torch.save` with a `state_dict`, the index of their shards, or a folder of transformers; relative to the run file.
    It is read once, when the run begins."""
    step: Count | None = None
    """Step of the checkpoint; by default the newest."""
    names: dict[Text, Text] = Field(default_factory=no_keys)
    """Name in the file -> name in the model, where they differ. Names are those of the module's `state_dict`, or of the
    model's initializers. An asterisk stands for the same text in both: `"module.*": "*"`. The first key that matches
    applies."""
    missing: list[Text] = Field(default_factory=no_items)
    """Glob patterns of tensors of the model that keep their values of the model file, such as a new head: `head.*`."""
    unexpected: list[Text] = Field(default_factory=no_items)
    """Glob patterns of entries of the file that are not read."""


class Lora(Section):
    """Low-rank adapters: the named weights are trained as their value plus a product of two small matrices, and all
    other parameters keep their values."""

    match: list[Text] = Field(min_length=1)
    """Glob patterns of weights, of which matrices get an adapter: `*.q_proj.weight`."""
    rank: Positive = 8
    """Rank of the product."""
    alpha: PositiveFloat = 16.0
    """The product is multiplied by alpha / rank."""
    train: list[Text] = Field(default_factory=no_items)
    """Glob patterns of parameters that are trained as a whole, such as a new head."""


Recomputed = Literal["layers"] | list[Text] | list[list[Text]]
"""`layers`, patterns, or the tensors that each layer ends with."""


class ModelSection(Section):
    """The model and which of its parameters are trained."""

    path: Text
    """ONNX file of the forward graph, relative to the run file."""
    start_from: StartFrom | None = None
    """Weights to start with; without it, the model file's. Every tensor of the model must have a value there, of its
    shape, and every entry a tensor, except for what `missing` and `unexpected` list."""
    loss: Loss
    """The loss that is minimised."""
    graphs: UserGraphs = UserGraphs.model_construct()
    """Custom graphs that replace those built from `path`."""
    parameters: ParameterPatterns = ParameterPatterns.model_construct()
    """Patterns that override which initializers are trained."""
    lora: Lora | None = None
    """Train low-rank adapters."""
    recompute: Recomputed = Field(default_factory=no_items)
    """What is recomputed for the backward pass, which takes less memory and more time, with the same results:
    `layers`, found by what repeats in the graph; glob patterns over modules (`h.*`) or node names; or the tensors that
    each layer ends with, one list per layer."""
    # torch.onnx.export(dynamo=True) optimises by default: it folds weights into constants and merges initializers of
    # equal values, such as all LayerNorm weights of a new model, which then train as one (torch 2.13 and 2.15).
    accept_inference_export: bool = False
    """Train a model although its file shows signs of an export for inference, which changes the training."""
    labels: list[Text] = Field(default_factory=no_items)
    """Inputs of the graph that are labels: needed for training, absent from the exported model."""
    metrics: list[MetricSection] = Field(default_factory=no_items)
    """Metrics that evaluation computes besides the loss: names, or sections with options."""

    @property
    def recomputed_scopes(self) -> list[str]:
        """The patterns of `recompute`; empty if it finds or names layers in another way."""
        return [pattern for pattern in self.recompute if isinstance(pattern, str)] if self.recompute != "layers" else []

    @property
    def recomputed_layers(self) -> Literal["layers"] | list[list[str]]:
        """The layers of `recompute`; empty if it has patterns."""
        return (
            "layers" if self.recompute == "layers" else [layer for layer in self.recompute if isinstance(layer, list)]
        )
