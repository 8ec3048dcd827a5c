"""`ortflow image`: checks the container image of a run's pods.

Registered in `ortflow.cli.app`. Must not import heavy packages at module level: `--help` loads this module.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from ortflow.cli.findings import print_findings
from ortflow.cli.runs import JsonOption

app = typer.Typer(name="image", help="Check the container image of a run.", no_args_is_help=True)


class AnyMpi(str, Enum):
    """As in the run file, or any that is installed."""

    AUTO = "auto"
    MPICH = "mpich"
    OPENMPI = "openmpi"


@app.callback()
def image() -> None:
    """Makes `check` a subcommand, although it is the only one."""


@app.command()
def check(
    python: Annotated[str, typer.Option(help="Interpreter of the ranks, as in the run file.")] = "python",
    mpi: Annotated[AnyMpi, typer.Option(help="Expected MPI, as in the run file.")] = AnyMpi.AUTO,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of sshd, as in the run file.")] = 2222,
    as_json: JsonOption = False,
) -> None:
    """Check that an image has what ranks need.

    Run it inside the image, as the user of the run. Prints one line per check; exit code 1 if there is a fault.
    """
    from ortflow.launchers.doctor.image import Wanted, examine_image

    print_findings(examine_image(Wanted(python, mpi.value, port)), as_json=as_json)
