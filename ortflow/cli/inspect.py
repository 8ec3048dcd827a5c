"""`ortflow inspect`: what a model file holds and what ortflow would train of it."""

from __future__ import annotations

import json as jsonlib
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ortflow.cli.status import table
from ortflow.launchers.view.lines import size
from ortflow.workflow.errors import UserError

if TYPE_CHECKING:
    from ortflow.workflow.graph.intake.inspect import Report, Value
    from ortflow.workflow.graph.roles.decide import Role
    from ortflow.workflow.planning.forecast import Forecast
    from ortflow.workflow.spec.run import TrainerRunSpec


NOTHING: list[str] = []


def inspect(
    model: Annotated[
        list[str],
        typer.Argument(
            help="ONNX file of the forward graph; with --plan and --passes, overrides of run file values.",
            metavar="MODEL | KEY=VALUE...",
            show_default=False,
        ),
    ] = NOTHING,
    plan: Annotated[
        Path | None,
        typer.Option("--plan", help="Run file: predict the memory of a rank, by part.", show_default=False),
    ] = None,
    passes: Annotated[
        Path | None,
        typer.Option("--passes", help="Run file: list the graph passes, and what each changes.", show_default=False),
    ] = None,
    after: Annotated[
        str | None,
        typer.Option("--after", metavar="PASS", help="With --passes: write the graph behind it.", show_default=False),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="With --after: the file to write.", show_default=False)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    every: Annotated[bool, typer.Option("--all", help="List every tensor, including small constants.")] = False,
) -> None:
    """Print what a model would train.

    Also prints its inputs, its constants, and what prevents its training.
    """
    if (after is None) != (output is None) or (after is not None and passes is None):
        raise UserError("--passes RUN_FILE, --after PASS and --output FILE belong together", where="ortflow inspect")
    if passes is not None and plan is not None:
        raise UserError("--plan and --passes cannot be combined", where="ortflow inspect", fix="give one of them")
    if passes is not None:
        _passes(passes, model, after, output, json)
        return
    if plan is not None:
        _plan(plan, model, json)
        return
    if len(model) != 1:
        message = "one model file is needed, or --plan or --passes and a run file"
        raise UserError(message, where="ortflow inspect", fix="name it")
    if model[0].endswith((".yaml", ".yml")):
        raise UserError(
            f"{model[0]} is a run file, not an ONNX model",
            fix=f"name the .onnx file, or predict the run's memory with `ortflow inspect --plan {model[0]}`",
        )
    from ortflow.workflow.graph.intake.inspect import findings

    report = findings(Path(model[0]))
    if json:
        typer.echo(jsonlib.dumps(report.to_json(), indent=2))
    else:
        _print(report, every)


def _run(run_file: Path, overrides: list[str]) -> TrainerRunSpec:
    from ortflow.workflow.spec.file.load import load_run_file
    from ortflow.workflow.spec.file.paths import resolve_paths
    from ortflow.workflow.spec.run import trainer_run

    return trainer_run(resolve_paths(load_run_file(run_file, overrides, files=True), run_file), "ortflow inspect")


def _passes(run_file: Path, overrides: list[str], after: str | None, output: Path | None, json: bool) -> None:
    """List the passes that make the graphs of a run, or write the graph behind one."""
    from ortflow.workflow.assembly.passes import lines, passes_of, write_graph

    recorder = passes_of(_run(run_file, overrides), after)
    if output is not None:
        write_graph(recorder, output)
    elif json:
        typer.echo(jsonlib.dumps([asdict(effect) for effect in recorder.effects], indent=2))
    else:
        for text in table([("pass", "nodes", "changes"), *lines(recorder.effects)]):
            typer.echo(text)


def _plan(run_file: Path, overrides: list[str], json: bool) -> None:
    """Predict the memory of a rank of a run."""
    from ortflow.workflow.planning.forecast import forecast

    prediction = forecast(_run(run_file, overrides))
    if json:
        typer.echo(jsonlib.dumps(prediction.to_json(), indent=2))
    else:
        _print_plan(prediction)


def _print_plan(prediction: Forecast) -> None:
    from ortflow.workflow.planning.forecast import ADVICE, SHOWN

    device = "GPU" if prediction.device == "cuda" else "CPU"
    of = "a rank" if prediction.ranks == 1 else f"rank {prediction.rank}, which needs most of {prediction.ranks},"
    typer.echo(f"memory of {of} on the {device}, predicted, {prediction.micro_batch} samples a micro-batch")
    for name, count in (*prediction.parts.items(), ("in all", prediction.total)):
        formula = prediction.formulas.get(name)
        typer.echo(f"  {name:<12}{size(count):>8}" + (f"  = {formula}" if formula else ""))
    if prediction.saving is not None:
        saved_bytes, extra_operations = size(prediction.saving.activations), prediction.saving.operations - 1
        typer.echo(
            f"  without model.recompute, {saved_bytes} of activations; with it, about {extra_operations:.0%} more "
            "operations"
        )
    typer.echo(f"activations are largest at {prediction.peak.node}:")
    for name, count in prediction.peak.values[:SHOWN]:
        typer.echo(f"  {size(count):>8}  {name}")
    if prediction.peak.unknown:
        typer.echo(f"not counted, because their size is unknown: {len(prediction.peak.unknown)} values")
    typer.echo(f"the largest part: {prediction.largest}; {ADVICE[prediction.largest]}")


def _print(report: Report, every: bool) -> None:
    by = f", by {report.producer}" if report.producer else ""
    typer.echo(f"{report.path}: opset {report.opset}, IR version {report.ir_version}{by}")
    for title, values in (("input", report.inputs), ("output", report.outputs)):
        for value in values:
            typer.echo(f"  {title:<7}{value.name}  {value.dtype} {_dims(value)}")
    typer.echo(f"{report.parameters:,} values trained in {len(report.trained)} tensors")
    parts = ", ".join(f"{name} {size(count)}" for name, count in report.memory.items())
    typer.echo(f"memory of a rank with AdamW: {parts}, and the values of the graphs")
    constants = report.constants if every else [role for role in report.constants if _worth_listing(role)]
    for title, roles in (
        ("trained", report.trained),
        ("frozen", report.frozen),
        ("state", report.state),
        ("constants", constants),
    ):
        if roles:
            typer.echo(f"{title} ({len(roles)})")
            for text in table(_rows(roles, report.tied)):
                typer.echo(text)
    hidden = len(report.constants) - len(constants)
    if hidden:
        typer.echo(f"{hidden} more constants (integers and single numbers): --all lists them")
    for title, lines in (
        ("changed for training", report.notes),
        ("signs of an export for inference: export the model with ortflow.export_for_training", report.export_warnings),
        ("worth knowing", report.warnings),
        ("without a gradient", report.undifferentiable),
    ):
        if lines:
            typer.echo(f"{title}:")
            for line in lines:
                typer.echo(f"  - {line}")


def _worth_listing(role: Role) -> bool:
    return role.dtype == "FLOAT" and role.count > 1


def _dims(value: Value) -> str:
    return "?" if value.shape is None else str([d if d is not None else "?" for d in value.shape])


def _rows(roles: list[Role], tied: dict[str, list[str]]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("name", "shape", "why")]
    for role in roles:
        reason = role.reason + (f", read by {len(tied[role.name])} nodes" if role.name in tied else "")
        rows.append((role.name, str(list(role.shape)), reason))
    return rows
