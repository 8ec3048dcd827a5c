"""Several runs in one table. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ortflow.launchers.report.page import curves, document, moment, table
from ortflow.launchers.report.parallel_coordinates import parallel_coordinates
from ortflow.launchers.report.survey import Survey
from ortflow.launchers.report.timeline import MICRO
from ortflow.launchers.view.lines import duration, number


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
    return f"<section><h2>Comparison</h2>{table(head, rows, label='Comparison', numbers=list(numbers))}</section>"


def sweep_page(
    name: str,
    rows: Sequence[Sequence[str]],
    runs: Sequence[Survey],
    values: Sequence[Mapping[str, str]],
    metric: str | None,
    best: int | None,
    now: float,
) -> str:
    """The page of a sweep: a table whose first row is its head, values and results as lines, and all curves."""
    keys = list(values[0])
    metrics = list(dict.fromkeys(key for run in runs for key in run.status.evaluation))
    axes = [*keys, "loss", *(f"evaluation: {key}" for key in metrics)]
    lines = []
    for run, own_values in zip(runs, values, strict=True):
        results = [run.status.loss, *(run.status.evaluation.get(key) for key in metrics)]
        lines.append((run.status.name, [*(own_values.get(key) for key in keys), *results]))
    # The mark of the best run is the first column, which a table takes as the row's name.
    head, *body = ((*row[1:2], row[0] or "", *row[2:]) for row in rows)
    picture = parallel_coordinates(axes, lines, best, identifier="axes")
    done = sum(run.status.state.value == "finished" for run in runs)
    lead = f"{done} of {len(runs)} runs have finished"
    if best is not None:
        lead += f"; the best by {metric} is {runs[best].status.name}"
    sections = [
        f"<section><h2>Runs</h2>{table(head, body, caption=f'As of {moment(now)}; * marks the best')}</section>",
        f"<section><h2>Values and results</h2><figure>{picture}</figure></section>" if picture else "",
        curves(runs),
    ]
    return document(name, "sweep", f"{lead}.", sections)
