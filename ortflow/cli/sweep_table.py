"""`ortflow list --sweep`: the result of each run beside its values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ortflow.workflow.errors import UserError
from ortflow.workflow.spec.metrics import higher_is_better

if TYPE_CHECKING:
    from ortflow.launchers.status import RunStatus
    from ortflow.launchers.sweeps import Sweep


@dataclass(frozen=True)
class Results:
    """The status of a sweep's runs, and the best of them."""

    sweep: Sweep
    found: Sequence[RunStatus]
    """Statuses in the order of the sweep's members."""
    metric: str | None
    """The metric by which they are compared; None if nothing was evaluated yet."""
    best: int | None

    def rows(self) -> list[tuple[str, ...]]:
        """Rows of text; the best run is marked."""
        metrics = metrics_of(self.found)
        rows: list[tuple[str, ...]] = [
            ("", "NAME", *self.sweep.keys, "STATE", "STEP", "LOSS", *(f"EVAL {name.upper()}" for name in metrics))
        ]
        for place, (member, run_status) in enumerate(zip(self.sweep.members, self.found, strict=True)):
            step = f"{run_status.step}/{run_status.total_steps}" if run_status.total_steps else str(run_status.step)
            results = [number(run_status.loss), *(number(run_status.evaluation.get(name)) for name in metrics)]
            mark = "*" if place == self.best else ""
            rows.append((mark, member.run.root.name, *member.values.values(), run_status.state.value, step, *results))
        return rows

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        runs = [
            {"values": dict(member.values), "best": place == self.best, **run_status.to_json()}
            for place, (member, run_status) in enumerate(zip(self.sweep.members, self.found, strict=True))
        ]
        return {"sweep": self.sweep.name, "metric": self.metric, "runs": runs}


def results(sweep: Sweep, run_statuses: Sequence[RunStatus], by: str | None) -> Results:
    """The results compared `by` a metric, by default the first; raises UserError for an unknown metric."""
    metrics = metrics_of(run_statuses)
    if by is not None and metrics and by not in metrics:
        raise UserError(f"no run of {sweep.name} was evaluated by {by}", fix=f"there are: {', '.join(metrics)}")
    metric = by if by in metrics else next(iter(metrics), None)
    if metric is None:
        return Results(sweep, run_statuses, None, None)
    sign = -1.0 if higher_is_better(metric) else 1.0
    ranked = [
        (sign * value, place)
        for place, run_status in enumerate(run_statuses)
        if (value := run_status.evaluation.get(metric)) is not None and _is_finite(run_status.evaluation.values())
    ]
    return Results(sweep, run_statuses, metric, min(ranked)[1] if ranked else None)


def _is_finite(values: Iterable[float | None]) -> bool:
    """Whether an evaluation can be compared: with a loss that is NaN, its accuracy means nothing."""
    return all(value is not None and math.isfinite(value) for value in values)


def metrics_of(run_statuses: Sequence[RunStatus]) -> list[str]:
    """All metrics of the evaluated runs, in the order of the records."""
    return list(dict.fromkeys(name for run_status in run_statuses for name in run_status.evaluation))


def number(value: float | None) -> str:
    """A loss or a metric; NaN if the record has no finite number."""
    return "-" if value is None else f"{value:.4f}"
