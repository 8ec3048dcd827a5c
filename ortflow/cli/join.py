"""`ortflow join`: joins the stages of a pipeline into one model.

Registered in `ortflow.cli.app`. Must not import heavy packages at module level: `--help` loads this module.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ortflow.workflow.graph.stages.join import Joined

_SHOWN = 5


def join(
    stages: Annotated[
        list[Path], typer.Argument(help="ONNX files of the stages, in order.", metavar="STAGE...", show_default=False)
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Model file to write.", show_default=False)],
    untied: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Weights that are different ones in each file, although their values are the same. May be repeated.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Join the stages of a pipeline into one model.

    A weight that several files have, with the same name and values, becomes one weight. Prints the keys of the run file
    that cut the model at the same places.
    """
    import yaml

    from ortflow.workflow.assembly.joining import join_files

    joined = join_files(stages, output, untied or [])
    for line in _lines(joined):
        typer.echo(f"# {line}")
    changes = {"model": {"path": str(output)}, "parallel": {"pipeline": len(stages), "cuts": joined.cuts}}
    typer.echo(yaml.safe_dump(changes, sort_keys=False, default_flow_style=None), nl=False)


def _lines(joined: Joined) -> Iterator[str]:
    """What became of weights that have the same name and shape in several files."""
    holders: dict[tuple[str, int], list[int]] = {}
    for group in joined.tied:
        if group.real:
            holders.setdefault((group.name, group.first), [group.first]).append(group.stage)
    together: dict[tuple[int, ...], list[str]] = {}
    for (name, _), stages in holders.items():
        together.setdefault(tuple(stages), []).append(name)
    for (*rest, last), names in together.items():
        among = f"{', '.join(map(str, rest))} and {last}"
        yield f"one weight each, because name, shape and values are the same in the stages {among}: {_some(names)}"
    for kind, reason in (
        ("other values", "a weight of the same name and shape in an earlier stage has other values"),
        ("equal numbers", "all their elements are one number, as in new scales and biases"),
    ):
        names = [group.name for group in joined.apart if group.was.kind == kind and group.was.real]
        if names:
            yield f"different weights, because {reason}: {_some(names)}"


def _some(names: Sequence[str]) -> str:
    """The first few names, and the number of others."""
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{rest}"
