"""`ortflow join`: joins the stages of a pipeline into one model.

Registered in `ortflow.cli.app`. Must not import heavy packages at module level: `--help` loads this module.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def join(
    stages: Annotated[
        list[Path], typer.Argument(help="ONNX files of the stages, in order.", metavar="STAGE...", show_default=False)
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Model file to write.", show_default=False)],
) -> None:
    """Join the stages of a pipeline into one model.

    Prints the keys of the run file that cut it at the same places.
    """
    import yaml

    from ortflow.workflow.assembly.joining import join_files

    cuts = join_files(stages, output)
    found = {"model": {"path": str(output)}, "parallel": {"pipeline": len(stages), "cuts": cuts}}
    typer.echo(yaml.safe_dump(found, sort_keys=False, default_flow_style=None), nl=False)
