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
    from ortflow.workflow.rundir import RunDir


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
        known = runs_in(runs)
        if not known:
            raise UserError(f"there is no run in {runs}", fix="give its directory, or --runs-dir")
        found = max(known, key=lambda one: one.attempts.stat().st_mtime if one.attempts.exists() else 0.0)
    else:
        found = find_run(run, runs, adopts=True)
    how = launcher_of(found).status(found)
    if as_json:
        print_json(how.to_json())
        return
    for key, value in describe(how, time.time()):
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
    ours = [run for run in runs_in(runs) if only is None or _is_of(run, only)]
    found = launcher.listed(ours, everywhere=everywhere) if isinstance(launcher, Listing) else statuses(ours)
    if as_json:
        print_json([how.to_json() for how in found])
        return
    if not found:
        cluster = launcher.scope if isinstance(launcher, Listing) else ""
        typer.echo(f"no runs in {runs}" + ("" if everywhere else cluster))
        return
    print_table(overview(found, time.time()), ("WAITS", "NAME"))


def _is_of(run: RunDir, name: str) -> bool:
    from ortflow.launchers.base import launcher_name

    try:
        return launcher_name(run.read_attempts()) == name
    except OSError:
        return False


def _list_sweep(name: str, by: str | None, runs: Path, *, as_json: bool) -> None:
    from ortflow.cli.sweep_table import results
    from ortflow.launchers.base import statuses

    found = find_sweep(name, runs)
    reported = results(found, statuses(found.runs), by)
    if as_json:
        print_json(reported.to_json())
        return
    print_table(reported.rows(), ("NAME", *found.keys))


def overview(found: Sequence[RunStatus], now: float) -> list[tuple[str, ...]]:
    """Statuses as rows of text; an empty column is left out. Pure."""
    head = ("NAME", "STATE", "STEP", "LOSS", "UPDATED", "EVALUATION", "BEST", "RANKS", "JOB", "WAITS")
    rows = [
        (
            Path(how.directory).name,
            how.state.value,
            _step(how),
            _number(how.loss),
            _ago(how.time, now),
            "" if how.metric is None else f"{how.metric} {_number(how.evaluation.get(how.metric))}",
            "" if how.best_value is None else f"{_number(how.best_value)} at {how.best_step}",
            (how.ranks or "").partition(":")[0],
            how.job or "",
            (how.waits or "").partition(";")[0],
        )
        for how in found
    ]
    columns = [place for place in range(len(head)) if place < 5 or any(row[place] for row in rows)]
    return [tuple(row[place] for place in columns) for row in (head, *rows)]


def describe(how: RunStatus, now: float) -> list[tuple[str, str]]:
    """A status as rows of text; unknown values have no row. Pure."""
    from ortflow.launchers.lines import counted, duration, format_evaluation
    from ortflow.launchers.records import State

    job, end, launcher = how.job, how.cause, None
    if job is not None and how.job_restarts:
        job += f", started again {'once' if how.job_restarts == 1 else f'{how.job_restarts} times'}"
    if job is not None and how.nodes:
        job += f", on {how.nodes}"
    if end is not None and how.state in (State.FAILED, State.PREEMPTED) and how.why not in (None, "", how.cause):
        # Includes why a failed run is not restarted.
        end += f"; {how.why}"
    if how.pid is not None:
        launcher = f"{how.launcher or 'local'}, process {how.pid} on {how.host}"
    ends = f"{counted(how.failures, 'failure')}, {counted(how.preemptions, 'preemption')}"
    rows = {
        "run": how.name,
        "directory": how.directory,
        "state": how.state.value,
        "next": "`ortflow resume` continues" if how.state is State.LOST and how.attempts else None,
        "waits": how.waits,
        "expected": None if how.starts_at is None else _moment(how.starts_at, now),
        "job": job,
        "job ends": None if how.job_ends_at is None else _moment(how.job_ends_at, now),
        "doing": how.phase,
        "ranks": how.ranks,
        "preflight": how.preflight,
        "excluded": "; ".join(f"{node}: {why}" for node, why in how.excluded_nodes.items()) or None,
        "step": _step(how),
        "loss": None if how.loss is None else _number(how.loss),
        "evaluation": format_evaluation(how.evaluation) or None,
        "left": None if how.seconds_left is None else duration(how.seconds_left),
        "memory": _memory(how.memory, now=how.state is State.RUNNING),
        "checkpoint": None if how.checkpoint is None else f"step {how.checkpoint}",
        "best": _best(how),
        "attempts": f"{how.attempts} (counted: {ends})",
        "last end": end,
        "exported": how.exported,
        "launcher": launcher,
        "updated": _ago(how.time, now),
        "damaged": how.damaged,
    }
    return [(name, value) for name, value in rows.items() if value is not None]


def _memory(sizes: dict[str, int] | None, *, now: bool) -> str | None:
    """The memory of rank 0; only its maximum unless it runs."""
    from ortflow.launchers.lines import size

    if sizes is None:
        return None
    parts = []
    for what, current, most in (("", "resident", "peak"), (" of the GPU", "gpu_used", "gpu_peak")):
        shown = [size(sizes[current])] if now and current in sizes else []
        shown += [f"at most {size(sizes[most])}"] if most in sizes else []
        parts += [f"{', '.join(shown)}{what}"] if shown else []
    return f"rank 0: {'; '.join(parts)}" if parts else None


def _best(how: RunStatus) -> str | None:
    """The best checkpoint and where its model is; without `checkpoint.best`, the best evaluation."""
    best = how.best_checkpoint
    if best is None:
        return None if how.best_value is None else f"{how.metric} {_number(how.best_value)} at step {how.best_step}"
    exported = f", exported {best['path']}" if "path" in best else ""
    return f"step {best['step']}, {best['metric']} {_number(best['value'])}{exported}"


def print_table(rows: Sequence[tuple[str, ...]], give_way: Sequence[str]) -> None:
    """Print rows, each shortened to one line of the terminal; unshortened without a terminal."""
    width = None
    if sys.stdout.isatty():
        # Queries the terminal: COLUMNS may be from another one or outdated.
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
        kept = max(NARROWEST, longest - (total - width))
        for row in cells:
            row[place] = cut(row[place], kept)
    return [tuple(row) for row in cells]


def table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows as lines, their columns aligned. Pure."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def cut(text: str, width: int | None) -> str:
    """A row in one line of a terminal: a long one ends in …; unchanged if `width` is None. Pure."""
    return text if width is None or len(text) <= width else text[: width - 1].rstrip() + "…"


def _step(how: RunStatus) -> str:
    if how.state.value == "finished" and not how.attempts:
        return "-"  # its records were lost
    return f"{how.step}/{how.total_steps}" if how.total_steps else str(how.step)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _moment(moment: float, now: float) -> str:
    """A time of day, and the time until then if it is in the future."""
    from ortflow.launchers.lines import duration

    days = "%a %H:%M" if abs(moment - now) < 6 * 86400 else "%Y-%m-%d %H:%M"
    clock = time.strftime("%H:%M" if abs(moment - now) < 12 * 3600 else days, time.localtime(moment))
    return f"at {clock}, in {duration(moment - now)}" if moment > now else f"at {clock}"


def _ago(moment: float | None, now: float) -> str:
    from ortflow.launchers.lines import duration

    if moment is not None and moment > now + AHEAD:
        return f"{duration(moment - now)} ahead"
    return "-" if moment is None else f"{duration(max(0.0, now - moment))} ago"
