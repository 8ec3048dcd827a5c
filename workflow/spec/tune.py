"""The run file's `tune` section: the search that `ortflow tune` makes over keys of the run file."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from ortflow.workflow.spec.base import Count, Number, Positive, Section, Text

Ends = Annotated[list[Number], Field(min_length=2, max_length=2)]
WholeEnds = Annotated[list[int], Field(min_length=2, max_length=2)]
Values = Annotated[list[Any], Field(min_length=1)]


class Range(Section):
    """The values of one key: one of these forms. A list stands for `choice`."""

    choice: Values | None = None
    """Any of these values."""
    uniform: Ends | None = None
    """A number between these two, each as likely."""
    log: Ends | None = None
    """A number between these two, its logarithm as likely; both are positive."""
    integer: WholeEnds | None = None
    """An integer from the first to the last, both included."""
    log_integer: WholeEnds | None = None
    """The same, its logarithm as likely; both are positive."""

    @property
    def forms(self) -> dict[str, list[Any]]:
        """The forms that are given, by name; `check` allows one."""
        return {name: value for name, value in self.model_dump().items() if value is not None}


class TuneSection(Section):
    """A search over keys of the run file: `ortflow tune`. Other commands do not use it."""

    metric: Text = "loss"
    """Result of the last evaluation by which trials are compared: loss, or a metric of `model.metrics` by its name in
    the results."""
    mode: Literal["min", "max"] | None = None
    """Which results are better; by default as known of the metric."""
    trials: Positive | None = None
    """Number of runs, failed ones included; required unless the sampler is grid, which tries every combination."""
    space: Annotated[dict[Text, Range | Values], Field(min_length=1)]
    """Key path -> its values, such as `train.optimizer.lr: {log: [1e-4, 1e-1]}` or `data.micro_batch: [16, 32]`."""
    sampler: Literal["tpe", "random", "grid"] = "tpe"
    """How values are chosen: by the results so far (tpe, the tree-structured Parzen estimator), at random, or all
    combinations of lists."""
    seed: Count = 0
    """Seed of the sampler. That of the runs is the run file's `seed`."""
    pruner: Literal["none", "successive_halving", "median"] = "none"
    """Which runs are stopped early, judged by their periodic evaluations: those behind the best 1 / `reduction_factor`
    at steps that grow by that factor (successive_halving), or behind the median of the earlier ones."""
    min_steps: Positive | None = None
    """Steps before which no run is stopped; by default those before the first periodic evaluation."""
    reduction_factor: Annotated[int, Field(ge=2, le=1000)] = 3
    """For successive_halving."""
