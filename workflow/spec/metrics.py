"""The evaluation metrics: one table of supported losses, reduction, and which direction is better.

Read by the run file's checks, the evaluation graph, the trainer, early stopping, sweeps and the documentation. A new
metric is an entry here and, unless it follows from the loss, nodes in `ortflow.workflow.graph.objective.metrics`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Metric = Literal["accuracy", "perplexity"]
Watched = Literal["loss", Metric]
"""Results of an evaluation: always the loss, and the metrics that `model.metrics` lists."""

LARGEST_EXPONENT = 700.0
"""Above this, exp overflows a double."""


@dataclass(frozen=True)
class Properties:
    """Properties of a metric."""

    meaning: str
    """One line for the documentation."""
    losses: dict[str, str]
    """Supported values of `model.loss.kind`, and what the metric counts for each."""
    higher_is_better: bool
    of_loss: Callable[[float], float] | None = None
    """The metric as a function of the mean loss over the evaluation set.

    None: the evaluation graph has outputs `ortflow.<metric>_sum` and `ortflow.<metric>_weight`, whose totals over
    batches and ranks are divided.
    """


def perplexity(loss: float) -> float:
    """exp(loss); `loss` is in nats. Not finite if the loss is not."""
    return loss if not math.isfinite(loss) else math.exp(min(loss, LARGEST_EXPONENT))


METRICS: dict[Metric, Properties] = {
    "accuracy": Properties(
        meaning="share of correct predictions",
        losses={
            "cross_entropy": "labels that equal the class of the largest logit; `ignore_index` does not count",
            "bce_with_logits": "elements where logit > 0 and target > 0.5 agree",
        },
        higher_is_better=True,
    ),
    "perplexity": Properties(
        meaning="exp of the evaluation loss",
        losses={"cross_entropy": "as the loss", "output": "as the loss, which must be a cross-entropy"},
        higher_is_better=False,
        of_loss=perplexity,
    ),
}


def higher_is_better(metric: str) -> bool:
    """Whether a larger value of a metric or of the loss is an improvement."""
    return any(name == metric and known.higher_is_better for name, known in METRICS.items())


def misuse(metric: Metric, loss: str) -> str | None:
    """Why a metric is not computed for a loss of this kind; None if it is."""
    losses = METRICS[metric].losses
    if loss in losses:
        return None
    kinds = " and ".join(losses)
    return f"{metric}, which is computed for the loss{'es' if len(losses) > 1 else ''} {kinds}, not for {loss}"
