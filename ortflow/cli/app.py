"""The command line: every command by name, and how errors become one sentence and an exit code.

Commands are registered here; each has its own module. The modules import what they need when they run, because
`--help` loads all of them. A command line that begins with the name of a command loads only that module.
"""

from __future__ import annotations

import errno
import gc
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Annotated, ClassVar, NamedTuple

import typer

import ortflow
from ortflow.cli.extras import needs_extra
from ortflow.cli.help import GroupedCommands
from ortflow.cli.program import ProgramCommand
from ortflow.launchers import open_files
from ortflow.workflow.errors import EXIT_FAILURE, EXIT_USER, OrtflowError, Preempted
from ortflow.workflow.system.streams import guarded, open_closed


class Verb(NamedTuple):
    """A command and where its function is."""

    module: str
    """Its module in this package."""
    function: str
    """Its function; `app` for a group of commands."""
    reachable: bool = False
    """It takes --host."""
    hidden: bool = False


GROUPS: Mapping[str, Mapping[str, Verb]] = {
    "Check a run": {
        "validate": Verb("validate", "validate"),
        "inspect": Verb("inspect", "inspect"),
        "plan": Verb("plan", "plan"),
        "doctor": Verb("doctor", "doctor", reachable=True),
        "find-lr": Verb("find_lr", "find_lr"),
        "prove": Verb("prove", "prove"),
        "render": Verb("submit", "render", reachable=True),
    },
    "Train": {
        "init": Verb("init", "init"),
        "run": Verb("run", "run"),
        "submit": Verb("submit", "submit", reachable=True),
        "tune": Verb("tune", "tune"),
        "resume": Verb("run", "resume", reachable=True),
        "cancel": Verb("cancel", "cancel", reachable=True),
        "supervise": Verb("supervise", "supervise"),
        "rank": Verb("rank", "rank", hidden=True),
    },
    "Follow runs": {
        "status": Verb("status", "status", reachable=True),
        "list": Verb("status", "list_runs", reachable=True),
        "logs": Verb("logs", "logs", reachable=True),
        "report": Verb("report", "report"),
        "goodput": Verb("goodput", "goodput"),
        "profile": Verb("profile", "profile"),
        "top": Verb("top", "top"),
    },
    "Models, checkpoints and data": {
        "export": Verb("export", "export"),
        "evaluate": Verb("evaluate", "evaluate"),
        "predict": Verb("predict", "predict"),
        "checkpoint": Verb("checkpoint", "app"),
        "join": Verb("join", "join"),
        "data": Verb("data", "app"),
    },
    "Tools": {
        "demo": Verb("demo", "demo"),
        "schema": Verb("schema", "schema"),
        "image": Verb("image", "app"),
    },
}
"""Title -> commands, in the order of `--help`."""
PROGRAMS = ("run", "init", "prove")
"""Commands that take a program with its arguments, besides those that are reachable."""
VERBS: Mapping[str, Verb] = {name: verb for verbs in GROUPS.values() for name, verb in verbs.items()}


class Commands(GroupedCommands):
    """All commands."""

    groups: ClassVar[Mapping[str, Sequence[str]]] = {title: [*verbs] for title, verbs in GROUPS.items()}


def _version(value: bool) -> None:
    if value:
        typer.echo(f"ortflow {ortflow.__version__}")
        raise typer.Exit


def ortflow_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train an ONNX model, or run a training program, from one run file, with restarts from checkpoints."""


def command_line(first: str | None = None) -> typer.Typer:
    """The command line; if `first` is the name of a command, with only that command."""
    app = typer.Typer(
        name="ortflow",
        cls=Commands,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(ortflow_command)
    for name, verb in VERBS.items():
        if first in VERBS and name != first:
            continue
        function = getattr(import_module(f"ortflow.cli.{verb.module}"), verb.function)
        if isinstance(function, typer.Typer):
            app.add_typer(function)
            continue
        if verb.reachable:
            from ortflow.cli.host import Reachable, reachable

            app.command(name, cls=Reachable)(reachable(function))
        else:
            app.command(name, hidden=verb.hidden, cls=ProgramCommand if name in PROGRAMS else None)(function)
    return app


def main() -> None:
    """Entry point of the `ortflow` command."""
    try:
        open_closed()
        with guarded():
            _main()
    finally:
        # The interpreter's last garbage collection would take a sixth of a short command's time.
        gc.freeze()


def _main() -> None:
    try:
        open_files.allow(open_files.OF_ANY_COMMAND)
        command_line(sys.argv[1] if len(sys.argv) > 1 else None)(prog_name="ortflow")
    except Preempted as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    except OrtflowError as error:
        code, text = error.exit_code, str(error)
    except BrokenPipeError:
        raise  # the reader of the pipe has gone: click handles it
    except OSError as error:
        from ortflow.workflow.system.disk_space import is_full, out_of_disk

        if error.filename is None:
            raise
        # No later attempt can open a path that is too long.
        code = EXIT_USER if error.errno == errno.ENAMETOOLONG else EXIT_FAILURE
        text = str(out_of_disk(error)) if is_full(error) else f"{os.fspath(error.filename)}: {error.strerror}"
    except ModuleNotFoundError as error:
        missing = needs_extra(error.name or "")
        if missing is None:
            raise
        code, text = missing.exit_code, str(missing)
    for line in text.splitlines():
        print(f"error: {line}", file=sys.stderr)
    sys.exit(code)
