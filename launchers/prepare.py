"""The run file's `prepare` command: makes the model or the data where they are not there yet."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

from ortflow.launchers.memory import oom_kills
from ortflow.workflow.errors import EndedBySignal, UserError, check_signal
from ortflow.workflow.spec.file.paths import check_files
from ortflow.workflow.spec.run import RunSpec


def prepare(spec: RunSpec, folder: Path | None, python: str, memory: str | None = None) -> None:
    """Run the command in `folder`, if that is known and a file is missing; a leading `python` is the ranks'.

    Its output goes where ours goes. Raises UserError where it fails, or where something is still missing,
    EndedBySignal where it was ended from outside. `memory` is the key that limits what it may take.
    """
    if spec.prepare and folder is not None and missing(spec):
        command = [python if spec.prepare[0] in ("python", "python3") else spec.prepare[0], *spec.prepare[1:]]
        kills = oom_kills() or 0
        try:
            code = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL).returncode
        except OSError as error:
            raise UserError(f"{command[0]} does not start: {error.strerror}", where="prepare") from error
        if code and memory is not None and (oom_kills() or 0) > kills:
            # The exit code is that of whatever noticed.
            raise EndedBySignal(f"`{shlex.join(spec.prepare)}` ran out of memory; raise {memory}")
        check_signal(code, f"`{shlex.join(spec.prepare)}`")
        if code:
            raise UserError(f"`{shlex.join(spec.prepare)}` ended with exit code {code}", where="prepare")
    for what in missing(spec):
        raise UserError(what, fix="correct the path, or the `prepare` command that makes it")


def missing(spec: RunSpec) -> list[str]:
    """What the run reads and is not there: paths absolute."""
    problems = check_files(spec.model_copy(update={"prepare": []}))
    return [f"{'.'.join(map(str, problem.path))}: {problem.what}" for problem in problems]
