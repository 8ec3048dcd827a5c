"""The part of a batch script that is the same for every scheduler: the line that starts the run supervisor. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

SCRIPT = "job.sh"
"""The script's name in the run directory, in the folder with the launcher's name."""
RUN_FILE = "--run-file"
"""Option of the supervisor process: the run file is on its standard input."""
FOLDER = "--folder"
"""Option of the supervisor process: the folder in which `prepare` runs."""
LEAVE = "cd /"
"""The line before the supervisor's, whose `python -m` would import modules of the user's folder before Python's own.
The supervisor returns there (`launchers/start_folder.py`)."""
END = "END_OF_THE_RUN_FILE"
"""A line that occurs in no run file that ortflow writes: it contains no colon."""


def supervisor(
    python: str, module: str, run_dir: Path, *, has_run_file: bool = False, folder: Path | None = None
) -> list[str]:
    """The arguments before the command that starts the ranks.

    `has_run_file`: the script contains the run file (`with_input`), and `prepare` runs in `folder`.
    """
    arguments = [python, "-m", module, str(run_dir)]
    if has_run_file:
        arguments += [RUN_FILE, *([FOLDER, str(folder)] if folder is not None else [])]
    return [*arguments, "--"]


def with_input(command: list[str], run_file: str | None) -> Iterator[str]:
    """The lines of a command with the run file on its standard input, unchanged by the shell."""
    yield from command[:-1]
    if run_file is None:
        yield command[-1]
        return
    yield f"{command[-1]} <<'{END}'"
    yield from run_file.rstrip("\n").split("\n")
    yield END
