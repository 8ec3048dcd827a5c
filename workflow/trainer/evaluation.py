"""From the sums of an evaluation graph over all ranks to the results of an evaluation. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ortflow.workflow.spec.metric_targets import Compared, compared
from ortflow.workflow.spec.metrics import METRICS
from ortflow.workflow.spec.model import ModelSection, WeightedSum
from ortflow.workflow.trainer.metric_values import Array, Scores, matrix_of, quotient, value_of

Tables = dict[str, list[list[int]]]


def evaluated(
    totals: Mapping[str, Array], gathered: Mapping[str, Scores], model: ModelSection
) -> tuple[dict[str, float], Tables]:
    """Numbers by name, the loss first, and tables.

    `totals`: the graph's outputs, summed over all batches and ranks. `gathered`: scores and truths of all ranks, by
    metric.
    """
    values = {"loss": _ratio(totals, "loss")}
    if isinstance(model.loss, WeightedSum):
        terms = {name: _ratio(totals, f"loss.{name}") for name in model.loss.names}
        values["loss"] = sum(term.weight * terms[name] for name, term in zip(terms, model.loss.terms, strict=True))
        values |= {f"loss.{name}": value for name, value in terms.items()}
    tables: Tables = {}
    for metric in model.metrics:
        of_loss = METRICS[metric.name].of_loss
        if of_loss is not None:
            values[metric.key] = of_loss(values["loss"])
        elif metric.name == "confusion_matrix":
            tables[metric.key] = matrix_of(totals[f"ortflow.{metric.key}_sums"])
        else:
            comparison = compared(metric, model.loss) if metric.name != "graph" else None
            task = comparison.task if isinstance(comparison, Compared) else None
            values[metric.key] = value_of(metric, task, totals, gathered)
    # A user's own evaluation graph may have more.
    summed_names = [name.removeprefix("ortflow.").removesuffix("_sum") for name in totals if name.endswith("_sum")]
    return values | {name: _ratio(totals, name) for name in summed_names if name not in values}, tables


def _ratio(totals: Mapping[str, Array], name: str) -> float:
    """`ortflow.NAME_sum` over `ortflow.NAME_weight`; NaN if the weight is 0."""
    return quotient(float(totals[f"ortflow.{name}_sum"][0]), float(totals[f"ortflow.{name}_weight"][0]))


def gathered_metrics(model: ModelSection) -> list[str]:
    """The metrics whose scores are gathered on rank 0."""
    return [metric.key for metric in model.metrics if metric.name in ("auroc", "average_precision")]


def joined(pieces: list[dict[str, list[np.ndarray]]], keys: list[str]) -> dict[str, Scores]:
    """The scores and truths of all ranks, by metric; `pieces` has those of each rank's batches, by output."""

    def whole(output: str) -> np.ndarray:
        arrays = [array for piece in pieces for array in piece.get(output, ())]
        return np.concatenate(arrays) if arrays else np.zeros((0, 1), np.float32)

    return {key: (whole(f"ortflow.{key}_scores"), whole(f"ortflow.{key}_truths")) for key in keys}
