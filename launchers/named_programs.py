"""Programs that a run file names and that a command which only examines a run must not start.

A run file may come from somebody else: `doctor` and `plan` start its interpreter, or mpirun with its arguments, only if
the command line repeats the value. `run`, `resume` and `submit` start what the file says.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ortflow.launchers.base import Submission
    from ortflow.workflow.spec.run import RunSpec

PYTHON, ARGUMENTS = "resources.python", "backends.local.arguments"


def unconfirmed(spec: RunSpec, overrides: Sequence[str]) -> str | None:
    """Why nothing of the run may be started, with the fix; None if it may. `overrides` are the command line's."""
    keys = {value.partition("=")[0] for value in overrides}
    python = spec.resources.python
    if python is not None and PYTHON not in keys and not _is_this(python):
        return f"the run file names {python}, which is started only if you agree: add {PYTHON}={python}"
    if spec.backends.local.arguments and ARGUMENTS not in keys:
        words = ", ".join(spec.backends.local.arguments)
        return f"the run file has arguments for mpirun, which are used only if you agree: add {ARGUMENTS}='[{words}]'"
    return None


def trusts(submission: Submission) -> bool:
    """Whether a launcher may start what the run file names, in order to make the request of a submission."""
    return submission.printed is None or unconfirmed(submission.spec, submission.printed) is None


def _is_this(python: str) -> bool:
    """Whether it is this process's interpreter, by its path: links identify a virtual environment."""
    return os.path.abspath(os.path.expanduser(python)) == os.path.abspath(sys.executable)
