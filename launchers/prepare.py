"""The run file's `prepare` command: makes the model or the data if they do not exist yet."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

from ortflow.workflow.errors import EndedBySignal, UserError, check_signal
from ortflow.workflow.spec.file.paths import check_files
from ortflow.workflow.spec.run import RunSpec
from ortflow.workflow.system.oom import oom_kills


def prepare(spec: RunSpec, folder: Path | None, python: str, memory: str | None = None) -> None:
    """Run the command in `folder`, if known, when a file is missing; a leading `python` is the ranks' interpreter.

    Its output goes to our output. Raises UserError if it fails or a file is still missing,
    EndedBySignal if it was ended from outside. `memory` is the key that limits its memory.
    """
    if spec.prepare and folder is not None and missing(spec):
        command = [python if spec.prepare[0] in ("python", "python3") else spec.prepare[0], *spec.prepare[1:]]
        kills = oom_kills() or 0
        try:
            code = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL).returncode
        except OSError as error:
            raise UserError(f"{command[0]} cannot be started: {error.strerror}", where="prepare") from error
        if code and memory is not None and (oom_kills() or 0) > kills:
            # Any of its processes may have been killed, so its exit code varies.
            raise EndedBySignal(f"`{shlex.join(spec.prepare)}` ran out of memory; raise {memory}")
        check_signal(code, f"`{shlex.join(spec.prepare)}`")
        if code:
            raise UserError(f"`{shlex.join(spec.prepare)}` ended with exit code {code}", where="prepare")
    for item in missing(spec):
        raise UserError(item, fix="correct the path, or the `prepare` command that makes it")


def missing(spec: RunSpec) -> list[str]:
    """Missing files that the run reads, as absolute paths."""
    problems = check_files(spec.model_copy(update={"prepare": []}))
    return [f"{'.'.join(map(str, problem.path))}: {problem.what}" for problem in problems]
