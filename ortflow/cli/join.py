"""`ortflow join`: one model of the stages of a pipeline.

Wired into the command line by `ortflow.cli.app`. Nothing heavy may be imported at module level: `--help` reads this.
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
    """Make one model of the stages of a pipeline, and print the keys that cut it there."""
    import yaml

    from ortflow.workflow.assembly.joining import join_files

    cuts = join_files(stages, output)
    found = {"model": {"path": str(output)}, "parallel": {"pipeline": len(stages), "cuts": cuts}}
    typer.echo(yaml.safe_dump(found, sort_keys=False, default_flow_style=None), nl=False)
