"""`ortflow tune`: searches for values of a run file's keys, with one run for each trial."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ortflow.cli.runs import RUNS, JsonOption, RunsOption, print_json
from ortflow.cli.submission import BackendOption, FileArgument, FreshOption, OverridesArgument
from ortflow.launchers.names import HERE
from ortflow.workflow.errors import EXIT_PREEMPTED, OrtflowError, UserError

if TYPE_CHECKING:
    from ortflow.launchers.base import Submission
    from ortflow.launchers.tuning.study import Record, Trial
    from ortflow.workflow.spec.file.load import Reading
    from ortflow.workflow.spec.run import RunSpec, TrainerRunSpec
    from ortflow.workflow.spec.tune import TuneSection

LOCK = "tune.lock"
BEST = "best.yaml"
WITHOUT = "tune=null"


def tune(
    file: FileArgument,
    overrides: OverridesArgument = None,
    backend: BackendOption = HERE,
    at_once: Annotated[
        int, typer.Option("--at-once", metavar="N", min=1, help="Number of trials that may run at the same time.")
    ] = 1,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Where the best run file is written; by default RUNS/NAME.sweep/best.yaml."
        ),
    ] = None,
    fresh: FreshOption = False,
    json: JsonOption = False,
    runs: RunsOption = Path(RUNS),
) -> None:
    """Search for the best values of keys that the section `tune` names.

    Each trial is a run, NAME-0, NAME-1, …; the same command continues a search that was stopped or killed. Prints the
    table of trials, and writes the best run file.
    """
    import optuna  # noqa: F401  # before anything is written: `needs_extra` reports its absence

    from ortflow.launchers.attempts.locks import HeldError, hold
    from ortflow.launchers.base import find_launcher, is_elsewhere
    from ortflow.launchers.sweep_outputs import refuse_absolute_outputs
    from ortflow.launchers.sweeps import folder_of
    from ortflow.launchers.tuning.search import Search
    from ortflow.launchers.tuning.study import Record
    from ortflow.workflow.spec.file.paths import run_directory
    from ortflow.workflow.spec.metrics import higher_is_better

    launcher, assignments = find_launcher(backend), tuple(overrides or ())
    elsewhere = is_elsewhere(launcher)
    spec, section = _search_of(file, assignments, files=not elsewhere)
    if section.trials != 1:
        refuse_absolute_outputs(spec, section.space)
    _refuse_values(file, assignments, section)
    if output is not None and not output.absolute().parent.is_dir():
        raise UserError(f"there is no folder {output.absolute().parent}", where="--output", fix="create it first")
    root = run_directory(spec, Path.cwd()) if spec.run_dir else Path(os.path.abspath(runs / spec.name))
    folder = _folder(folder_of(root), fresh=fresh)
    try:
        lock = hold(folder / LOCK)
    except HeldError as error:
        raise UserError(f"another search works in {folder} ({error})", fix="wait for it, or use another name") from None
    try:
        metrics = spec.model.metrics if spec.model is not None else ()
        mode = section.mode or ("max" if higher_is_better(section.metric, metrics) else "min")
        first = section.min_steps or spec.train.evaluation.every_steps or 1
        record = Record(folder, section, _settings(spec, section), mode, first, spec.seed)

        def submission(number: int, values: Mapping[str, str], new: bool) -> Submission:
            return _submission(
                file, assignments, values, root, number, runs, fresh=fresh and new, elsewhere=elsewhere, new=new
            )

        def report(message: str) -> None:
            typer.echo(message, err=json)

        try:
            Search(root, record, section.metric, launcher, at_once, submission, report).run()
        except KeyboardInterrupt:
            typer.echo("stopped: its runs have saved; the same command continues the search", err=True)
            raise typer.Exit(EXIT_PREEMPTED) from None
        best = record.best
        path = None
        if best is not None:
            path = _write_best(output or folder / BEST, file, assignments, best.values, elsewhere=elsewhere)
        command = "ortflow run" if backend == HERE else f"ortflow submit --backend {backend}"
        _show(record, section, mode, root.name, path, command, json)
    finally:
        os.close(lock)
    if best is None:
        raise OrtflowError("no trial has finished with a result")


def _search_of(file: Path, assignments: Sequence[str], *, files: bool) -> tuple[TrainerRunSpec, TuneSection]:
    from ortflow.workflow.spec.run import trainer_run

    reading = _read(file, assignments, files=files)
    spec = trainer_run(_spec(reading), "ortflow tune")
    if spec.tune is None:
        raise UserError(
            f"{file} has no section tune", where="tune",
            fix="add it: tune: {metric: loss, trials: 20, space: {train.optimizer.lr: {log: [1e-4, 1e-1]}}}",
        )  # fmt: skip
    for assignment in assignments:
        key = assignment.partition("=")[0].strip()
        for other in spec.tune.space:
            if f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}."):
                raise UserError(f"{key} is given, and tune.space has {other}", fix="keep one of them")
    return spec, spec.tune


def _read(file: Path, assignments: Sequence[str], *, files: bool = True) -> Reading:
    from ortflow.workflow.spec.file.load import read_run_file

    return read_run_file(file, assignments, files=files)


def _spec(reading: Reading) -> Any:
    from ortflow.workflow.errors import Faults

    if reading.spec is None or reading.faults:
        raise Faults(reading.faults)
    return reading.spec


def _refuse_values(file: Path, assignments: Sequence[str], section: TuneSection) -> None:
    """Raise Faults if a key has no value that the run file allows."""
    from ortflow.launchers.tuning.space import ends
    from ortflow.workflow.errors import Faults

    faults: dict[str, list[list[Any]]] = {}
    for values in ends(section):
        for key, value in values.items():
            reading = _read(file, [*assignments, WITHOUT, f"{key}={value}"], files=False)
            faults.setdefault(key, []).append(reading.faults)
    for of_values in faults.values():
        if all(of_values):
            raise Faults(of_values[0])


def _folder(folder: Path, *, fresh: bool) -> Path:
    """The folder of the search, made if it does not exist. Raises UserError if it holds another kind of sweep."""
    from ortflow.launchers.attempts.locks import holder_of
    from ortflow.launchers.sweeps import SUFFIX, is_sweep
    from ortflow.launchers.tuning.study import JOURNAL
    from ortflow.workflow.system.files import free_name

    if fresh and (holder := holder_of(folder / LOCK)) is not None:
        raise UserError(
            f"a search works in {folder} (process {holder.get('pid', '?')} on {holder.get('host', '?')})",
            fix="stop it first, or use another name",
        )
    root = folder.with_name(folder.name.removesuffix(SUFFIX))
    if folder.is_dir() and fresh:
        folder.rename(free_name(folder))
    elif is_sweep(root) and not (folder / JOURNAL).exists():
        raise UserError(
            f"{folder} is the record of a sweep of `ortflow submit --set`",
            fix="give the search another name (name=…), or rename that sweep with --fresh",
        )
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _settings(spec: TrainerRunSpec, section: TuneSection) -> dict[str, Any]:
    """What must not change while a search goes on: everything but the number of trials."""
    rest = spec.model_dump(
        exclude={"tune": True, "resources": True, "restart": True, "monitor": True, "backends": True}
    )
    digest = hashlib.sha256(json.dumps(rest, sort_keys=True, default=str).encode()).hexdigest()
    return {**section.model_dump(exclude={"trials"}), "the run file's other keys": digest}


def _submission(
    file: Path, command_line: Sequence[str], values: Mapping[str, str], root: Path, number: int, runs: Path,
    *, fresh: bool, elsewhere: bool, new: bool,
) -> Submission:  # fmt: skip
    """The run of a trial. Raises Faults for values that the run file does not allow."""
    from ortflow.cli.submission import submission_of
    from ortflow.launchers.sweeps import member_root

    place = member_root(root, number)
    trial_keys = [f"name={place.name}", WITHOUT]
    if place.parent != Path(os.path.abspath(runs)):
        trial_keys.append(f"run_dir={json.dumps(str(place))}")
    assignments = [*command_line, *(f"{key}={value}" for key, value in values.items()), *trial_keys]
    submission = submission_of(file, assignments, runs, fresh=fresh, elsewhere=elsewhere)
    if new and not fresh and submission.run.read_attempts():
        raise UserError(f"{place} holds a run of something else", fix="--fresh renames it")
    return submission


def _write_best(
    path: Path, file: Path, assignments: Sequence[str], values: Mapping[str, str], *, elsewhere: bool
) -> Path:
    """Write the run file with the best values, and with absolute paths of what it reads.

    `elsewhere`: paths are of the pods' volume and stay as written, and what a submission carries is copied beside it.
    """
    from ortflow.workflow.run.rundir import write_atomically
    from ortflow.workflow.spec.file.dump import dump_values
    from ortflow.workflow.spec.file.paths import OUTPUTS, resolve_paths

    best_spec = _spec(_read(file, [*assignments, WITHOUT, *(f"{k}={v}" for k, v in values.items())], files=False))
    if elsewhere:
        _copy_carried(best_spec, file.absolute().parent, path.absolute().parent)
        write_atomically(path, dump_values(best_spec.model_dump(exclude={"tune"})).encode())
        return path
    as_written, resolved = best_spec.model_dump(), resolve_paths(best_spec, file).model_dump()
    for section, key in OUTPUTS:
        resolved[section][key] = as_written[section][key]
    resolved["run_dir"] = as_written["run_dir"]
    write_atomically(path, dump_values({key: value for key, value in resolved.items() if key != "tune"}).encode())
    return path


def _copy_carried(spec: RunSpec, source: Path, target: Path) -> None:
    """Copy the small files that are put into a ConfigMap; they are named relative to the run file's folder."""
    from ortflow.workflow.run.rundir import write_atomically

    for name in spec.backends.kubernetes.files if source != target else ():
        write_atomically(target / name, (source / name).read_bytes())


def _show(
    record: Record, section: TuneSection, mode: str, name: str, path: Path | None, command: str, as_json: bool
) -> None:
    trials, best = record.trials, record.best
    counts = {state: sum(trial.state == state for trial in trials) for state in ("complete", "pruned", "fail")}
    if as_json:
        print_json({
            "sweep": name, "metric": section.metric, "mode": mode, "sampler": section.sampler, "seed": section.seed,
            "finished": counts["complete"], "stopped early": counts["pruned"], "failed": counts["fail"],
            "best": None if best is None else best.number, "run_file": None if path is None else str(path),
            "trials": [{**vars(trial), "values": dict(trial.values)} for trial in trials],
        })  # fmt: skip
        return
    from ortflow.cli.status import print_table

    keys = list(section.space)
    rows: list[tuple[str, ...]] = [("", "NAME", *keys, "SEED", "STATE", "STEP", section.metric.upper())]
    rows += [_row(trial, name, keys, best) for trial in trials]
    print_table(rows, ("NAME", *keys))
    for trial in trials:
        if trial.reason:
            typer.echo(f"{name}-{trial.number} failed: {trial.reason}")
    typer.echo(
        f"{len(trials)} trials: {counts['complete']} finished, {counts['pruned']} stopped early, "
        f"{counts['fail']} failed; sampler {section.sampler}, seed {section.seed}"
    )
    if best is not None:
        typer.echo(f"best: {name}-{best.number}, {section.metric} {best.value:.6g}; {command} {path}")


_STATES = {"complete": "finished", "pruned": "stopped early", "fail": "failed", "running": "running"}


def _row(trial: Trial, name: str, keys: Sequence[str], best: Trial | None) -> tuple[str, ...]:
    mark = "*" if best is not None and trial.number == best.number else ""
    value = "-" if trial.value is None else f"{trial.value:.6g}"
    step = "-" if trial.step is None else str(trial.step)
    shown = [_short(trial.values[key]) for key in keys]
    return (mark, f"{name}-{trial.number}", *shown, trial.seed, _STATES[trial.state], step, value)


def _short(text: str) -> str:
    """A number with four digits, anything else as it is."""
    try:
        return f"{float(text):.4g}"
    except ValueError:
        return text
