"""The losses of the run file: a section for each `model.loss.kind`. docs/losses.md has the formulas and their sources.

A new loss is a class here, its place in `Loss` (`ortflow.workflow.spec.model`) and its nodes in
`ortflow.workflow.graph.objective.loss`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ortflow.workflow.spec.base import Count, Fraction, NonNegativeFloat, PositiveFloat, Section, Text

Level = Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)]


def _median() -> list[float]:
    return [0.5]


IGNORED = -100
"""Default of `ignore_index`, as in PyTorch."""


class ClassLoss(Section):
    """What losses of logits over classes have in common."""

    output: Text | None = None
    """Graph output with the logits, or with the probabilities that a Softmax makes of them; required if the graph has
    several outputs."""
    label: Text = "labels"
    """Name of the label input (int64) of the training graph."""
    ignore_index: int | None = IGNORED
    """Labels of this value are ignored; null: every label counts."""
    class_axis: int = -1
    """Axis of the logits that runs over the classes."""


class CrossEntropy(ClassLoss):
    """-log softmax(logits)[label], averaged over the labels that are not `ignore_index`."""

    kind: Literal["cross_entropy"]
    """Kind of loss."""
    # onnxscript 0.7.2 drops label smoothing of an exported cross-entropy: a loss that the graph computes has none.
    label_smoothing: Fraction = 0.0
    """Weight of the uniform distribution in the target, as in torch.nn.CrossEntropyLoss."""
    class_weights: list[NonNegativeFloat] | Text | None = None
    """A weight for each class, or a file with them (.npy, or text with one number a line). The loss is then the
    weighted average, as in torch.nn.CrossEntropyLoss."""


class Focal(ClassLoss):
    """-(1 - p)^gamma log p with p = softmax(logits)[label], averaged over the labels that are not `ignore_index`."""

    kind: Literal["focal"]
    """Kind of loss."""
    gamma: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 2.0
    """How strongly the loss of well-classified samples is reduced; below 1 the gradient has no bound."""
    class_weights: list[NonNegativeFloat] | Text | None = None
    """A factor of the loss for each class (alpha), or a file with them (.npy, or text with one number a line). The
    average remains that over the number of labels."""


class MultiMargin(ClassLoss):
    """The hinge loss of several classes, as torch.nn.MultiMarginLoss: for each label the sum over the other classes of
    max(0, margin - logit of the label + logit of the class), divided by the number of classes."""

    kind: Literal["multi_margin"]
    """Kind of loss."""
    margin: PositiveFloat = 1.0
    """Distance between the label's logit and the others from which on the loss is 0."""


class Dice(ClassLoss):
    """1 - (2 sum p y + smooth) / (sum p + sum y + smooth) with p = softmax(logits), for each sample and class over all
    positions, averaged over samples and classes."""

    kind: Literal["dice"]
    """Kind of loss."""
    smooth: PositiveFloat = 1e-5
    """Added to both sums, so that a class that is absent has a loss."""


class ValueLoss(Section):
    """What losses of a prediction against values have in common."""

    output: Text | None = None
    """Graph output with the prediction; required if the graph has several outputs."""
    label: Text = "labels"
    """Name of the label input (the prediction's shape and type)."""


class Regression(ValueLoss):
    """Mean squared error or mean absolute error over all elements."""

    kind: Literal["mse", "l1"]
    """Kind of loss."""


class Huber(ValueLoss):
    """With d = |prediction - label|: d^2 / 2 up to delta, and delta (d - delta / 2) above; averaged over all elements,
    as torch.nn.HuberLoss."""

    kind: Literal["huber"]
    """Kind of loss."""
    delta: PositiveFloat = 1.0
    """Difference from which on the loss is linear."""


class SmoothL1(ValueLoss):
    """With d = |prediction - label|: d^2 / (2 beta) up to beta, and d - beta / 2 above; averaged over all elements, as
    torch.nn.SmoothL1Loss."""

    kind: Literal["smooth_l1"]
    """Kind of loss."""
    beta: PositiveFloat = 1.0
    """Difference from which on the loss is linear."""


class Poisson(ValueLoss):
    """The negative log-likelihood of counts without its constant term, averaged over all elements, as
    torch.nn.PoissonNLLLoss."""

    kind: Literal["poisson"]
    """Kind of loss."""
    log_input: bool = True
    """Whether the prediction is the logarithm of the rate: exp(x) - y x. Otherwise it is the rate:
    x - y log(x + 1e-8)."""


class Quantile(ValueLoss):
    """The pinball loss: max(q (y - x), (q - 1) (y - x)), averaged over all elements."""

    kind: Literal["quantile"]
    """Kind of loss."""
    quantiles: Annotated[list[Level], Field(min_length=1)] = Field(default_factory=_median)
    """Which quantiles are predicted. If there are several, the output's last axis runs over them, and the label has
    the same axes with a last one of length 1."""


class TargetLoss(Section):
    """What losses of logits against targets in [0, 1] have in common."""

    output: Text | None = None
    """Graph output with the logits, or with the probabilities that a Sigmoid makes of them; required if the graph has
    several outputs."""
    label: Text = "labels"
    """Name of the label input (the logits' shape and type)."""


class BinaryCrossEntropy(TargetLoss):
    """Binary cross-entropy of logits against targets in [0, 1], averaged over all elements."""

    kind: Literal["bce_with_logits"]
    """Kind of loss."""
    pos_weight: PositiveFloat | Annotated[list[PositiveFloat], Field(min_length=1)] | None = None
    """Factor of the loss of positive targets, as in torch.nn.BCEWithLogitsLoss: one number, or one for each element of
    the last axis."""


class BinaryFocal(TargetLoss):
    """Binary cross-entropy times (1 - p)^gamma, p the probability of the target, averaged over all elements, as
    torchvision.ops.sigmoid_focal_loss."""

    kind: Literal["binary_focal"]
    """Kind of loss."""
    gamma: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 2.0
    """How strongly the loss of well-classified elements is reduced; below 1 the gradient has no bound."""
    alpha: Level | None = None
    """Factor of the loss of positive targets; that of negative ones is 1 - alpha."""


class Hinge(TargetLoss):
    """max(0, 1 - t x) of logits x, with t = 2 y - 1 for targets y of 0 and 1, averaged over all elements."""

    kind: Literal["hinge"]
    """Kind of loss."""


class BinaryDice(TargetLoss):
    """1 - (2 sum p y + smooth) / (sum p + sum y + smooth) with p = sigmoid(logits), for each sample and element of the
    second axis (the channels) over all positions, averaged over samples and channels."""

    kind: Literal["binary_dice"]
    """Kind of loss."""
    smooth: PositiveFloat = 1e-5
    """Added to both sums, so that an empty target has a loss."""


class Divergence(Section):
    """The Kullback-Leibler divergence of softmax(logits / temperature) from target probabilities, times temperature^2,
    averaged over everything but the classes; at temperature 1 as torch.nn.KLDivLoss(reduction="batchmean")."""

    kind: Literal["kl_div"]
    """Kind of loss."""
    output: Text | None = None
    """Graph output with the logits, or with the probabilities that a Softmax makes of them; required if the graph has
    several outputs."""
    label: Text = "labels"
    """Name of the label input with the target probabilities (the logits' shape and type)."""
    class_axis: int = -1
    """Axis of the logits that runs over the classes."""
    temperature: PositiveFloat = 1.0
    """Divides the logits, also those of a teacher. The targets of a label are used as given."""
    teacher: Text | None = None
    """ONNX file of another model, relative to the run file, in place of the label: the targets are softmax(its logits /
    temperature). It reads inputs by name, and is neither trained nor part of checkpoints and exports."""
    teacher_output: Text | None = None
    """Output of the teacher with the logits, or with the probabilities that a Softmax makes of them; by default its
    only one, else the one with the name of `output`."""


class Ctc(Section):
    """Connectionist temporal classification: -log of the probability of a label sequence, over all its places in time,
    divided by its length and averaged over the samples, as torch.nn.CTCLoss."""

    kind: Literal["ctc"]
    """Kind of loss."""
    output: Text | None = None
    """Graph output with logits or log-probabilities, [time, batch, classes]; required if the graph has several
    outputs."""
    batch_first: bool = False
    """Whether the output is [batch, time, classes]."""
    label: Text = "labels"
    """Name of the label input (int64 [batch, length]) of the training graph."""
    input_lengths: Text | None = None
    """Name of the input (int64 [batch]) with the number of each sample's frames in the output; by default all."""
    target_lengths: Text | None = None
    """Name of the input (int64 [batch]) with the number of each sample's labels; by default those that are not
    negative, so that a `pad_value` of -1 ends them."""
    blank: Count = 0
    """Class of the blank."""
    zero_infinity: bool = False
    """Whether a sample whose labels do not fit in its frames has the loss 0; otherwise the loss is infinite, and the
    step is skipped."""

    @property
    def class_axis(self) -> int:
        """Axis of the logits that runs over the classes."""
        return -1


class OutputLoss(Section):
    """A scalar output of the graph is the loss: a mean over the samples of the batch."""

    kind: Literal["output"]
    """Kind of loss."""
    output: Text
    """The scalar output."""


class InfoNce(Section):
    """The loss of CLIP: for the vectors of two outputs, the mean of the cross-entropies of cosine similarity /
    temperature over rows and over columns. The negatives of a sample are the others of its micro-batch on one rank."""

    kind: Literal["info_nce"]
    """Kind of loss."""
    output: Text
    """Graph output with one vector a sample."""
    other: Text
    """Graph output with the vectors that belong to them, row by row."""
    temperature: PositiveFloat = 0.07
    """Divides the similarities."""


class Triplet(Section):
    """max(0, |a - p| - |a - n| + margin) of the vectors of three outputs, averaged over the samples, as
    torch.nn.TripletMarginLoss."""

    kind: Literal["triplet"]
    """Kind of loss."""
    output: Text
    """Graph output with one vector a sample, a."""
    positive: Text
    """Graph output with the vectors that should be near, p."""
    negative: Text
    """Graph output with the vectors that should be far, n."""
    margin: PositiveFloat = 1.0
    """How much farther n should be."""


Unlabelled = OutputLoss | InfoNce | Triplet
"""Losses without a label."""
