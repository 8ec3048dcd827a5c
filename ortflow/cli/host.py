"""`--host user@login`: runs a command with this version of ortflow on a cluster's login node, over ssh.

Wraps commands in `ortflow.cli.app`. The command line is rebuilt from its parsed form, so that a command needs no
change: only the run file and its inputs have other paths on the login node.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_type_hints

import typer

from ortflow.cli.help import ReachableCommand
from ortflow.launchers.names import AT_LOGIN
from ortflow.workflow.errors import UserError

if TYPE_CHECKING:
    from ortflow.launchers.base import Launcher
    from ortflow.launchers.remote.memory import Used
    from ortflow.workflow.spec.run import RunSpec

FOLDER = "~/ortflow"
PYTHON = "python3"
OURS = {
    "host": Annotated[
        str | None,
        typer.Option(
            "--host",
            metavar="[USER@]HOST",
            envvar="ORTFLOW_HOST",
            help="Run the command on this login node, by ssh.",
        ),
    ],
    "host_dir": Annotated[
        str | None,
        typer.Option(
            "--host-dir", metavar="DIR", envvar="ORTFLOW_HOST_DIR",
            help=f"Folder there for runs, inputs and code; {FOLDER}, or the one last given for the host.",
        ),
    ],
    "host_python": Annotated[
        str | None,
        typer.Option(
            "--host-python", metavar="PYTHON", envvar="ORTFLOW_HOST_PYTHON",
            help="Python there; the run file's resources.python, the one last used there, or python3.",
        ),
    ],
}  # fmt: skip


TAKE_PROGRAMS = ("submit", "render")


class Reachable(ReachableCommand):
    """A command with the options of `OURS`."""

    apart: ClassVar[Sequence[str]] = (*OURS,)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """For commands that take a program: keep its arguments behind `--` apart."""
        from ortflow.cli.program import split_arguments, unknown_options

        if self.name not in TAKE_PROGRAMS:
            return super().parse_args(ctx, args)
        with unknown_options(ctx, args):
            return super().parse_args(ctx, split_arguments(args))


FILE, OVERRIDES, BOTH, BACKEND = "file", "overrides", "arguments", "backend"
"""Parameters of commands that are also used on this side."""


def reachable(verb: Callable[..., None]) -> Callable[..., None]:
    """The command with the option --host; without --host, the command itself runs."""

    def carried_out(
        ctx: typer.Context, host: str | None, host_dir: str | None, host_python: str | None, **arguments: Any
    ) -> None:
        if not host:
            verb(**arguments)
            return
        raise typer.Exit(carry_out(ctx, host, host_dir, host_python))

    hints = get_type_hints(verb, include_extras=True)
    own_parameters = [
        parameter.replace(annotation=hints[parameter.name]) for parameter in inspect.signature(verb).parameters.values()
    ]
    kind = inspect.Parameter.KEYWORD_ONLY
    context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    added = [inspect.Parameter(name, kind, default=None, annotation=hint) for name, hint in OURS.items()]
    parameters = [context, *(parameter.replace(kind=kind) for parameter in own_parameters), *added]
    # typer reads both: names and defaults from the signature, hints from the annotations.
    carried_out.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    carried_out.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    carried_out.__name__, carried_out.__doc__ = verb.__name__, verb.__doc__
    return carried_out


def carry_out(ctx: typer.Context, host: str, folder: str | None, python: str | None) -> int:
    """Run the command on the login node; returns its exit code."""
    from ortflow.cli.program import is_program
    from ortflow.launchers.base import find_launcher, is_elsewhere
    from ortflow.launchers.remote.code import own_code, requirements
    from ortflow.launchers.remote.connection import connect
    from ortflow.launchers.remote.inputs import named
    from ortflow.launchers.remote.login import Login
    from ortflow.launchers.remote.memory import recall, remember
    from ortflow.launchers.remote.payload import cluster_own, pack, send
    from ortflow.workflow.spec.file.load import load_run_file

    launcher = find_launcher(backend_of(ctx))
    if is_elsewhere(launcher):
        message = f"--host is for login nodes; the cluster of the launcher {backend_of(ctx)} is reached directly"
        raise UserError(message, fix="leave it out")
    file, overrides = run_file_of(ctx)
    if file is not None and is_program(file):
        raise UserError(f"--host takes a run file, and {file} is a program", fix=f"`ortflow init {file}` writes one")
    spec = load_run_file(file, overrides) if file is not None else None
    used = choose(recall(host), python or (python_of(spec, launcher) if spec is not None else None), folder)
    login = Login(connect(host), used.python or PYTHON, used.folder or FOLDER)
    cluster_files = cluster_own(named(spec, file.absolute().parent)) if spec is not None and file is not None else []
    code, packages = own_code(), requirements()
    state = login.probe(
        packages, [(login.code_folder(code), code.sizes)], [cluster_file.text for cluster_file in cluster_files]
    )
    login.require(packages, state.lacking)
    remember(host, used)
    if not state.folders_complete[0]:
        login.bring_code(code)
    if spec is None or file is None:
        return login.run(code, retyped(ctx))
    present_files = [
        cluster_file.text
        for cluster_file, is_present in zip(cluster_files, state.paths_exist, strict=True)
        if is_present
    ]
    payload = pack(spec, file, login, present_files)
    # Commands that only query read no inputs.
    send(payload, login, only_run_file=ctx.command.name != "submit")
    return login.run(code, retyped(ctx, payload.run_file, payload.overrides()))


def run_file_of(ctx: typer.Context) -> tuple[Path | None, list[str]]:
    """The run file on the command line, if there is one, and the overrides."""
    from ortflow.cli.doctor import split

    if BOTH in ctx.params:
        return split(ctx.params[BOTH] or ())
    return ctx.params.get(FILE), overrides_of(ctx)


def overrides_of(ctx: typer.Context) -> list[str]:
    """The overrides on the command line, those behind `--` too, where a program would have its arguments."""
    from ortflow.cli.program import words_behind

    behind = words_behind() if ctx.command.name in TAKE_PROGRAMS else ()
    return [*(ctx.params.get(OVERRIDES) or ()), *behind]


def choose(before: Used, python: str | None, folder: str | None) -> Used:
    """What to use on a host: the given values, else the previous ones. Pure."""
    from ortflow.launchers.remote.memory import Used

    if folder is not None:
        # As in scp: a relative path starts at the home folder.
        folder = folder.rstrip("/") if folder.startswith(("/", "~")) else f"~/{folder.strip('/')}"
    return Used(python or before.python, folder or before.folder)


def backend_of(ctx: typer.Context) -> str:
    """The launcher on the command line, for a run or a list of runs; else that of login nodes."""
    source = ctx.get_parameter_source(BACKEND)
    typed = ctx.params.get(BACKEND) if source is not None and source.name == "COMMANDLINE" else ctx.params.get("only")
    return str(typed or AT_LOGIN)


def python_of(spec: RunSpec, launcher: Launcher) -> str | None:
    """The Python that a run file names outside of containers. Pure."""
    from ortflow.launchers.capabilities import AtLogin

    return launcher.login_python(spec) if isinstance(launcher, AtLogin) else spec.resources.python


def retyped(ctx: typer.Context, run_file: str | None = None, overrides: Sequence[str] = ()) -> list[str]:
    """The command line for the login node: without the options of this side, and with the run file's path there.

    Values from this side's environment variables are left out, because they are valid only here. Without --backend
    the scheduler's launcher is used, because login nodes are not for training.
    """
    options: list[str] = []
    arguments: list[str] = []
    for param in ctx.command.params:
        name, value = str(param.name), ctx.params.get(str(param.name))
        source = ctx.get_parameter_source(name)
        typed = source is not None and source.name == "COMMANDLINE"
        if name == FILE and run_file is not None:
            arguments.append(run_file)
        elif name == OVERRIDES:
            arguments += [*overrides_of(ctx), *(overrides if FILE in ctx.params else ())]
        elif name == BOTH and run_file is not None:
            arguments += [run_file, *run_file_of(ctx)[1], *overrides]
        elif name == BACKEND and not typed:
            options.append(f"--backend={AT_LOGIN}")
        elif name in OURS or not typed:
            continue
        elif param.param_type_name == "argument":
            arguments += map(str, value if isinstance(value, (list, tuple)) else [value])
        else:
            options += _option(param, value)
    # What is behind `--` would be a program's arguments there.
    apart = ["--"] if arguments and ctx.command.name not in TAKE_PROGRAMS else []
    return [str(ctx.command.name), *options, *apart, *arguments]


def _option(param: Any, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [max(param.opts if value else param.secondary_opts, key=len)]
    name = max(param.opts, key=len)
    values = value if isinstance(value, (list, tuple)) else [value]
    return [f"{name}={getattr(item, 'value', item)}" for item in values]
