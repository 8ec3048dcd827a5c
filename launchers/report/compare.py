"""Several runs in one table. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ortflow.launchers.lines import duration, number
from ortflow.launchers.report.page import table
from ortflow.launchers.report.survey import Survey
from ortflow.launchers.report.timeline import MICRO


def comparison(runs: Sequence[Survey]) -> str:
    """The results of several runs, as a section."""
    metrics = list(dict.fromkeys(name for run in runs for name in run.status.evaluation))
    head = (
        "Run",
        "State",
        "Step",
        "Loss",
        *(f"Evaluation: {name}" for name in metrics),
        "Wall time",
        "Goodput",
        "Restarts",
    )
    rows = [
        (
            run.status.name,
            run.status.state.value,
            str(run.status.step),
            "-" if run.status.loss is None else number(run.status.loss),
            *(
                "-" if run.status.evaluation.get(name) is None else number(run.status.evaluation[name])
                for name in metrics
            ),
            duration(run.account.wall / MICRO),
            "-" if run.account.goodput is None else f"{100 * run.account.goodput:.1f}%",
            str(len(run.restarts)),
        )
        for run in runs
    ]
    numbers = range(2, len(head))
    return f"<section><h2>Comparison</h2>{table(head, rows, numbers=list(numbers))}</section>"
