"""A training program on the command line in place of a run file: `ortflow run train.py --ranks 2 -- --lr 1e-3`.

Used by run, submit, render and init. The same run file that `ortflow init` writes is made in memory.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from ortflow.workflow.errors import UserError

if TYPE_CHECKING:
    from ortflow.workflow.spec.file.load import Reading

RanksOption = Annotated[int | None, typer.Option("--ranks", min=1, help="Ranks of a program, over all nodes.")]
NodesOption = Annotated[int | None, typer.Option("--nodes", min=1, help="Nodes of a program.")]
GpusOption = Annotated[int | None, typer.Option("--gpus", min=0, help="GPUs of each rank of a program.")]
NameOption = Annotated[str | None, typer.Option("--name", help="Name of a program's run; by default its file's.")]
StartOption = Annotated[
    str | None,
    typer.Option("--start", help="What starts a program: direct, torchrun, deepspeed, accelerate or horovod."),
]
TARGET = "A run file (YAML), or a training program: a Python file or an executable, its arguments behind `--`."
TargetArgument = Annotated[Path, typer.Argument(metavar="RUN_FILE|PROGRAM", help=TARGET)]

_BEHIND: ContextVar[tuple[str, ...]] = ContextVar("behind", default=())
"""The words behind `--` of the present command."""
_RUN_FILES = (".yaml", ".yml", ".json")


class ProgramCommand(TyperCommand):
    """A command that takes a program's arguments behind `--`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep what is behind `--` apart from the overrides."""
        with unknown_options(ctx, args):
            return super().parse_args(ctx, split_arguments(args))


@contextlib.contextmanager
def unknown_options(ctx: Any, args: Sequence[str]) -> Iterator[None]:
    """Raise UserError for an unknown option of a command line that names a program: it is likely the program's."""
    file = next((word for word in args if is_program(Path(word))), None)
    try:
        yield
    except Exception as error:
        # By name: the class is click's or, in newer releases of typer, that of a copy in typer.
        if type(error).__name__ != "NoSuchOption" or file is None:
            raise
        option, command = getattr(error, "option_name", "an option"), ctx.command_path
        raise UserError(
            f"`{command}` has no option {option}",
            fix=f"put the program's arguments behind `--`: {file} -- {option} …",
        ) from None


def split_arguments(args: list[str]) -> list[str]:
    """The words before `--`; those behind it are kept for `Typed`."""
    place = args.index("--") if "--" in args else len(args)
    _BEHIND.set(tuple(args[place + 1 :]))
    return args[:place]


def words_behind() -> tuple[str, ...]:
    """The words behind `--` of the present command."""
    return _BEHIND.get()


@dataclass(frozen=True)
class Typed:
    """What the command line says of a program."""

    ranks: int | None = None
    nodes: int | None = None
    gpus: int | None = None
    name: str | None = None
    start: str | None = None
    arguments: Sequence[str] = ()
    """The words behind `--`."""

    @classmethod
    def here(cls, ranks: int | None, nodes: int | None, gpus: int | None, name: str | None, start: str | None) -> Typed:
        """With the present command's words behind `--`."""
        return cls(ranks, nodes, gpus, name, start, words_behind())

    def reading(self, file: Path, overrides: Sequence[str], *, files: bool = True, elsewhere: bool = False) -> Reading:
        """The run of a run file or a program, or all errors. Raises UserError for options that do not fit.

        `elsewhere`: the run's files are not on this machine: a script goes with the run.
        """
        from ortflow.workflow.spec.file.load import read_run_file, read_values

        if is_program(file):
            values = self.values(file, elsewhere=elsewhere)
            _refuse_arguments(overrides, file)
            return read_values(values, file, overrides, files=files)
        for option, value, key in (
            ("--ranks", self.ranks, "resources.ranks_per_node"), ("--nodes", self.nodes, "resources.nodes"),
            ("--gpus", self.gpus, "resources.gpus_per_rank"), ("--name", self.name, "name"),
            ("--start", self.start, "program.start"),
        ):  # fmt: skip
            if value is not None:
                raise UserError(f"{option} is for a program, and {file} is a run file", fix=f"write {key}={value}")
        if any(word.startswith("-") or "=" not in word for word in self.arguments):
            raise UserError(
                f"arguments behind `--` are for a program, and {file} is a run file",
                fix=f"write program.args={shlex.quote(shlex.join(self.arguments))}",
            )
        return read_run_file(file, [*overrides, *self.arguments], files=files)

    def values(self, file: Path, *, elsewhere: bool = False) -> dict[str, Any]:
        """The run file's values for a program. Raises UserError if it does not exist or the ranks do not divide."""
        if not file.is_file():
            raise UserError(f"there is no file {file}", fix="give the path of a run file or of a program")
        nodes = self.nodes or 1
        ranks = nodes if self.ranks is None else self.ranks
        if ranks % nodes:
            raise UserError(
                f"--ranks: {ranks} ranks do not divide among {nodes} nodes", fix="give a multiple of --nodes"
            )
        path = os.path.abspath(file)
        program: dict[str, Any] = {"script": path} if is_python(file) else {"command": [path]}
        if elsewhere:
            program = {"script": file.name} if is_python(file) else {"command": [f"./{file.name}"]}
        program["args"] = list(self.arguments)
        if not elsewhere:
            program["cwd"] = os.getcwd()
        if self.start is not None:
            program["start"] = self.start
        resources = {"nodes": nodes, "ranks_per_node": ranks // nodes, "gpus_per_rank": self.gpus or 0}
        values = {"name": self.name or name_of(file), "program": program, "resources": resources}
        if elsewhere:
            values["backends"] = {"kubernetes": {"files": [file.name]}}
        return values


def _refuse_arguments(overrides: Sequence[str], file: Path) -> None:
    """Raise UserError if an override is likely an argument of the program."""
    from ortflow.workflow.spec.run import ProgramRunSpec

    for word in overrides:
        if "=" not in word or word.partition("=")[0].partition(".")[0] not in ProgramRunSpec.model_fields:
            raise UserError(
                f"{word!r} sets no key of the run file of a program",
                fix=f"put the program's arguments behind `--`: {file} -- {word}",
            )


def is_python(file: Path) -> bool:
    """Whether a file is a Python program by its name."""
    return file.suffix == ".py"


def is_program(file: Path) -> bool:
    """Whether a file on the command line is a program: a Python file, or an executable other than a run file."""
    if is_python(file):
        return True
    # Path.is_file raises for an override that is longer than a file's name may be.
    return file.suffix.lower() not in _RUN_FILES and os.path.isfile(file) and os.access(file, os.X_OK)


def name_of(file: Path) -> str:
    """A run's name from the name of a file."""
    return re.sub(r"[^a-z0-9]+", "-", file.stem.lower()).strip("-")[:52].strip("-") or "program"
