"""`ortflow status` and `ortflow list`: the state of runs."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ortflow.cli.runs import RUNS, JsonOption, RunsOption, complete_run, find_run, print_json, runs_in
from ortflow.cli.sweep import SweepOption, find_sweep
from ortflow.workflow.errors import UserError

if TYPE_CHECKING:
    from ortflow.launchers.status import RunStatus
    from ortflow.workflow.run.rundir import RunDir


def status(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]", help="Name or directory (default: the newest run).", autocompletion=complete_run
        ),
    ] = None,
    as_json: JsonOption = False,
    runs: RunsOption = Path(RUNS),
) -> None:
    """Print the state of a run."""
    from ortflow.launchers.base import launcher_of

    if run is None:
        all_runs = runs_in(runs)
        if not all_runs:
            raise UserError(f"there is no run in {runs}", fix="give its directory, or --runs-dir")
        newest = max(
            all_runs, key=lambda candidate: candidate.attempts.stat().st_mtime if candidate.attempts.exists() else 0.0
        )
    else:
        newest = find_run(run, runs, adopts=True)
    run_status = launcher_of(newest).status(newest)
    if as_json:
        print_json(run_status.to_json())
        return
    for key, value in describe(run_status, time.time()):
        typer.echo(f"{key:<12}{value}")


def list_runs(
    sweep: SweepOption = None,
    by: Annotated[
        str | None,
        typer.Option(
            "--by", metavar="METRIC", help="Metric by which the runs of a sweep are compared (default: the first)."
        ),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(
            "--backend",
            "-b",
            help="Only runs of this launcher; on clusters that allow it, also other users' runs.",
        ),
    ] = None,
    everywhere: Annotated[
        bool,
        typer.Option("--all-namespaces", "-A", help="With -b of a cluster with namespaces: runs of all namespaces."),
    ] = False,
    as_json: JsonOption = False,
    runs: RunsOption = Path(RUNS),
) -> None:
    """List the runs of the runs folder, or the results of a sweep."""
    from ortflow.launchers.base import find_launcher, statuses, ways_to
    from ortflow.launchers.capabilities import Listing

    if sweep is not None:
        _list_sweep(sweep, by, runs, as_json=as_json)
        return
    if by is not None:
        raise UserError("--by needs a sweep", fix="add --sweep NAME")
    launcher = find_launcher(only) if only is not None else None
    if everywhere and not isinstance(launcher, Listing):
        raise UserError("--all-namespaces needs a cluster that has namespaces", fix=ways_to(Listing))
    own_runs = [run for run in runs_in(runs) if only is None or _is_of(run, only)]
    run_statuses = (
        launcher.listed(own_runs, everywhere=everywhere) if isinstance(launcher, Listing) else statuses(own_runs)
    )
    if as_json:
        print_json([run_status.to_json() for run_status in run_statuses])
        return
    if not run_statuses:
        cluster = launcher.scope if isinstance(launcher, Listing) else ""
        typer.echo(f"no runs in {runs}" + ("" if everywhere else cluster))
        return
    print_table(overview(run_statuses, time.time()), ("WAITS", "NAME"))


def _is_of(run: RunDir, name: str) -> bool:
    from ortflow.launchers.base import launcher_name

    try:
        return launcher_name(run.read_attempts()) == name
    except OSError:
        return False


def _list_sweep(name: str, by: str | None, runs: Path, *, as_json: bool) -> None:
    from ortflow.cli.sweep_table import results
    from ortflow.launchers.base import statuses

    sweep_runs = find_sweep(name, runs)
    sweep_results = results(sweep_runs, statuses(sweep_runs.runs), by)
    if as_json:
        print_json(sweep_results.to_json())
        return
    print_table(sweep_results.rows(), ("NAME", *sweep_runs.keys))


def overview(run_statuses: Sequence[RunStatus], now: float) -> list[tuple[str, ...]]:
    """Statuses as rows of text; an empty column is left out. Pure."""
    head = ("NAME", "STATE", "STEP", "LOSS", "UPDATED", "EVALUATION", "BEST", "RANKS", "JOB", "WAITS")
    rows = [
        (
            Path(run_status.directory).name,
            run_status.state.value,
            _step(run_status),
            _number(run_status.loss),
            _ago(run_status.time, now),
            ""
            if run_status.metric is None
            else f"{run_status.metric} {_number(run_status.evaluation.get(run_status.metric))}",
            "" if run_status.best_value is None else f"{_number(run_status.best_value)} at {run_status.best_step}",
            (run_status.ranks or "").partition(":")[0],
            run_status.job or "",
            (run_status.waits or "").partition(";")[0],
        )
        for run_status in run_statuses
    ]
    columns = [place for place in range(len(head)) if place < 5 or any(row[place] for row in rows)]
    return [tuple(row[place] for place in columns) for row in (head, *rows)]


def describe(run_status: RunStatus, now: float) -> list[tuple[str, str]]:
    """A status as rows of text; unknown values have no row. Pure."""
    from ortflow.launchers.records import State
    from ortflow.launchers.view.lines import counted, duration, format_evaluation

    job, end, launcher = run_status.job, run_status.cause, None
    if job is not None and run_status.job_restarts:
        job += f", started again {'once' if run_status.job_restarts == 1 else f'{run_status.job_restarts} times'}"
    if job is not None and run_status.nodes:
        job += f", on {run_status.nodes}"
    if (
        end is not None
        and run_status.state in (State.FAILED, State.PREEMPTED)
        and run_status.why not in (None, "", run_status.cause)
    ):
        # Includes why a failed run is not restarted.
        end += f"; {run_status.why}"
    if run_status.pid is not None:
        launcher = f"{run_status.launcher or 'local'}, process {run_status.pid} on {run_status.host}"
    ends = f"{counted(run_status.failures, 'failure')}, {counted(run_status.preemptions, 'preemption')}"
    rows = {
        "run": run_status.name,
        "directory": run_status.directory,
        "state": run_status.state.value,
        "next": "`ortflow resume` continues" if run_status.state is State.LOST and run_status.attempts else None,
        "waits": run_status.waits,
        "expected": None if run_status.starts_at is None else _moment(run_status.starts_at, now),
        "job": job,
        "job ends": None if run_status.job_ends_at is None else _moment(run_status.job_ends_at, now),
        "doing": run_status.phase,
        "ranks": run_status.ranks,
        "preflight": run_status.preflight,
        "excluded": "; ".join(f"{node}: {reason}" for node, reason in run_status.excluded_nodes.items()) or None,
        "step": _step(run_status),
        "loss": None if run_status.loss is None else _number(run_status.loss),
        "evaluation": format_evaluation(run_status.evaluation) or None,
        "left": None if run_status.seconds_left is None else duration(run_status.seconds_left),
        "memory": _memory(run_status.memory, now=run_status.state is State.RUNNING),
        "checkpoint": None if run_status.checkpoint is None else f"step {run_status.checkpoint}",
        "best": _best(run_status),
        "attempts": f"{run_status.attempts} (counted: {ends})",
        "last end": end,
        "exported": run_status.exported,
        "launcher": launcher,
        "updated": _ago(run_status.time, now),
        "damaged": run_status.damaged,
    }
    return [(name, value) for name, value in rows.items() if value is not None]


def _memory(sizes: dict[str, int] | None, *, now: bool) -> str | None:
    """The memory of rank 0; only its maximum unless it runs."""
    from ortflow.launchers.view.lines import size

    if sizes is None:
        return None
    parts = []
    for device, current, most in (("", "resident", "peak"), (" of the GPU", "gpu_used", "gpu_peak")):
        shown = [size(sizes[current])] if now and current in sizes else []
        shown += [f"at most {size(sizes[most])}"] if most in sizes else []
        parts += [f"{', '.join(shown)}{device}"] if shown else []
    return f"rank 0: {'; '.join(parts)}" if parts else None


def _best(run_status: RunStatus) -> str | None:
    """The best checkpoint and where its model is; without `checkpoint.best`, the best evaluation."""
    best = run_status.best_checkpoint
    if best is None:
        return (
            None
            if run_status.best_value is None
            else f"{run_status.metric} {_number(run_status.best_value)} at step {run_status.best_step}"
        )
    exported = f", exported {best['path']}" if "path" in best else ""
    return f"step {best['step']}, {best['metric']} {_number(best['value'])}{exported}"


def print_table(rows: Sequence[tuple[str, ...]], give_way: Sequence[str]) -> None:
    """Print rows, each shortened to one line of the terminal; unshortened without a terminal."""
    width = None
    if sys.stdout.isatty():
        # Queries the terminal: COLUMNS may be from another one or outdated.
        # A terminal whose size nobody has set, such as a new pseudo-terminal, has 0 columns.
        width = os.get_terminal_size(sys.stdout.fileno()).columns or shutil.get_terminal_size().columns
    for text in table(fitted(rows, width, give_way)):
        typer.echo(cut(text, width))


AHEAD = 60.0
"""Seconds from which on a record of the future is shown as such: a clock was set, or another node's differs."""
NARROWEST = 12
"""Minimum width of a shortened cell, in characters."""


def fitted(rows: Sequence[tuple[str, ...]], width: int | None, give_way: Sequence[str]) -> list[tuple[str, ...]]:
    """Rows shortened to a width, as far as the columns in `give_way` (by their heads) allow. Pure."""
    cells = [list(row) for row in rows]
    for head in give_way:
        columns = [place for place, name in enumerate(cells[0]) if name == head]
        total = sum(max(len(row[place]) for row in cells) + 2 for place in range(len(cells[0]))) - 2
        if width is None or total <= width or not columns:
            continue
        (place,) = columns[:1]
        longest = max(len(row[place]) for row in cells)
        column_width = max(NARROWEST, longest - (total - width))
        for row in cells:
            row[place] = cut(row[place], column_width)
    return [tuple(row) for row in cells]


def table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows as lines, their columns aligned. Pure."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def cut(text: str, width: int | None) -> str:
    """A row in one line of a terminal: a long one ends in …; unchanged if `width` is None. Pure."""
    return text if width is None or len(text) <= width else text[: width - 1].rstrip() + "…"


def _step(run_status: RunStatus) -> str:
    if run_status.state.value == "finished" and not run_status.attempts:
        return "-"  # its records were lost
    return f"{run_status.step}/{run_status.total_steps}" if run_status.total_steps else str(run_status.step)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _moment(moment: float, now: float) -> str:
    """A time of day, and the time until then if it is in the future."""
    from ortflow.launchers.view.lines import duration

    days = "%a %H:%M" if abs(moment - now) < 6 * 86400 else "%Y-%m-%d %H:%M"
    clock = time.strftime("%H:%M" if abs(moment - now) < 12 * 3600 else days, time.localtime(moment))
    return f"at {clock}, in {duration(moment - now)}" if moment > now else f"at {clock}"


def _ago(moment: float | None, now: float) -> str:
    from ortflow.launchers.view.lines import duration

    if moment is not None and moment > now + AHEAD:
        return f"{duration(moment - now)} ahead"
    return "-" if moment is None else f"{duration(max(0.0, now - moment))} ago"
