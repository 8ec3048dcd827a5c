"""The command line: every verb by name, and how errors become one sentence and an exit code.

Verbs are wired here and live in modules of their own. Those modules import what they need when they run, because
`--help` reads all of them.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

import ortflow
from ortflow.cli import (
    cancel,
    checkpoint,
    data,
    doctor,
    export,
    image,
    inspect,
    logs,
    rank,
    run,
    schema,
    status,
    submit,
    supervise,
    validate,
)
from ortflow.cli.extras import needs_extra
from ortflow.cli.host import reachable
from ortflow.workflow.errors import EXIT_FAILURE, OrtflowError, Preempted
from ortflow.workflow.streams import guarded

app = typer.Typer(
    name="ortflow",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"ortflow {ortflow.__version__}")
        raise typer.Exit


@app.callback()
def ortflow_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """One run file trains any ONNX model; a run that is killed loses nothing."""


app.command("run")(run.run)
app.command("validate")(validate.validate)
app.command("inspect")(inspect.inspect)
app.command("doctor")(reachable(doctor.doctor))
app.command("submit")(reachable(submit.submit))
app.command("render")(reachable(submit.render))
app.command("status")(reachable(status.status))
app.command("list")(reachable(status.list_runs))
app.command("logs")(reachable(logs.logs))
app.command("cancel")(reachable(cancel.cancel))
app.command("resume")(reachable(run.resume))
app.command("supervise")(supervise.supervise)
app.command("export")(export.export)
app.command("rank", hidden=True)(rank.rank)
app.command("schema")(schema.schema)
app.add_typer(data.app)
app.add_typer(checkpoint.app)
app.add_typer(image.app)


def main() -> None:
    """Entry point of the `ortflow` command."""
    with guarded():
        _main()


def _main() -> None:
    try:
        app(prog_name="ortflow")
    except Preempted as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    except OrtflowError as error:
        code, text = error.exit_code, str(error)
    except BrokenPipeError:
        raise  # nobody reads any more: click knows what to do
    except OSError as error:
        if error.filename is None:
            raise
        code, text = EXIT_FAILURE, f"{os.fspath(error.filename)}: {error.strerror}"
    except ModuleNotFoundError as error:
        missing = needs_extra(error.name or "")
        if missing is None:
            raise
        code, text = missing.exit_code, str(missing)
    for line in text.splitlines():
        print(f"error: {line}", file=sys.stderr)
    sys.exit(code)
