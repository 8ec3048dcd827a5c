"""`ortflow prove`: whether a run that is killed resumes as if nothing had happened, and what it forgot if not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ortflow.cli.program import GpusOption, NameOption, RanksOption, StartOption, TargetArgument, Typed
from ortflow.cli.runs import RUNS, RunsOption
from ortflow.cli.submission import OverridesArgument, submission_of
from ortflow.workflow.errors import EXIT_FAILURE

if TYPE_CHECKING:
    from ortflow.workflow.spec.run import RunSpec

STEPS = 12


def prove(
    file: TargetArgument,
    overrides: OverridesArgument = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps of each run.")] = STEPS,
    seed: Annotated[
        int, typer.Option("--seed", min=0, help="Seed of the steps at which it is killed and stopped.")
    ] = 0,
    ranks: RanksOption = None,
    gpus: GpusOption = None,
    name: NameOption = None,
    start_by: StartOption = None,
    runs: RunsOption = Path(RUNS),
) -> None:
    """Kill and resume a short run, and compare it bit by bit.

    Trains four times on this machine: twice uninterrupted, once killed by SIGKILL, and once stopped by SIGTERM.
    Exit code 0: a resumed run is equal to an uninterrupted one. 1: it is not, and the forgotten state is named.
    """
    from ortflow.launchers.proving.prove import Verdict, prove, schedule
    from ortflow.launchers.proving.runs import folder_of_runs

    typed = Typed.here(ranks, None, gpus, name, start_by)
    submission = submission_of(file, overrides, runs, typed=typed)
    moments = schedule(steps, seed, submission.spec.world_size)

    def report(verdict: Verdict) -> None:
        typer.echo(str(verdict))

    with folder_of_runs(submission.run) as folder:
        short = replace(submission, spec=short_run(submission.spec, moments.steps, moments.period))
        if not prove(short, folder, moments, sources(short.spec), report):
            typer.echo(f"the runs and their traces are kept in {folder}")
            raise typer.Exit(EXIT_FAILURE)


def short_run(spec: RunSpec, steps: int, period: int) -> RunSpec:
    """The run with so many steps, checkpoints of that period, and no pause or export. Pure."""
    from ortflow.workflow.run.durations import parse_duration
    from ortflow.workflow.spec.run import TrainerRunSpec

    checkpoint: dict[str, object] = {"directory": "checkpoints", "every_steps": period, "every_seconds": None}
    backoff = spec.restart.backoff.model_copy(update={"first": 0.0})
    changes: dict[str, object] = {
        "restart": spec.restart.model_copy(update={"failures": 1, "preemptions": None, "backoff": backoff}),
        "monitor": spec.monitor.model_copy(update={"tensorboard": False}),
    }
    if isinstance(spec, TrainerRunSpec):
        checkpoint["asynchronous"] = False
        changes["export"] = spec.export.model_copy(update={"enabled": False})
        schedule = spec.train.schedule
        shorter: dict[str, object] = {"warmup_steps": min(schedule.warmup_steps, steps - 1)}
        if schedule.warmup is not None and schedule.warmup.endswith("steps"):
            shorter = {"warmup": f"{min(int(parse_duration(schedule.warmup).amount), steps - 1)} steps"}
        changes["train"] = spec.train.model_copy(
            update={"steps": steps, "epochs": None, "schedule": schedule.model_copy(update=shorter)}
        )
    changes["checkpoint"] = spec.checkpoint.model_copy(update=checkpoint)
    return spec.model_copy(update=changes)


def sources(spec: RunSpec) -> list[Path]:
    """The Python files of a program's own folder, in which causes are looked for that are no state."""
    section = spec.program
    if section is None or section.script is None:
        return []
    script = Path(section.script)
    neighbours = sorted(path for path in script.parent.glob("*.py") if path != script)
    imported = {line.split()[1].split(".")[0] for line in script.read_text(errors="replace").splitlines()
                if line.strip().startswith(("import ", "from ")) and len(line.split()) > 1}  # fmt: skip
    return [script, *(path for path in neighbours if path.stem in imported)]
