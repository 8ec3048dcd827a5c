"""`ortflow ARGUMENTS` within the process of a test: what it prints and its exit code, without a new interpreter.

For commands that read, check and submit. What starts ranks, handles signals or follows a log needs its own process:
`command` in project.py.
"""

from __future__ import annotations

import contextlib
import io
import os
import resource
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

from project import environment

from ortflow.cli import app


def command_here(*arguments: str, folder: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    """As `command` in project.py; the process has its folder, environment and limits again afterwards."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), started(arguments, folder, changes):
        try:
            app._main()
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        except Exception:  # noqa: BLE001 - the interpreter would print it
            traceback.print_exc()
            code = 1
    return subprocess.CompletedProcess(["ortflow", *arguments], code, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def started(arguments: tuple[str, ...], folder: Path, changes: dict[str, str]) -> Iterator[None]:
    """The surroundings of a command, for a while."""
    variables = environment(**changes)
    before = Path.cwd(), dict(os.environ), sys.argv, sys.stdin, resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(variables)
        sys.argv, sys.stdin = ["ortflow", *arguments], io.StringIO()
        yield
    finally:
        place, kept, sys.argv, sys.stdin, limits = before
        os.chdir(place)
        os.environ.clear()
        os.environ.update(kept)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
