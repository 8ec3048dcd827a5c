"""The limit of open files, checked before a command starts work that it could not finish."""

from __future__ import annotations

import resource

from ortflow.workflow.errors import UserError

OF_ANY_COMMAND = 32
"""Open files that any command needs; what a run needs beyond that is checked when it starts."""


def allow(file_count: int, process_name: str = "ortflow") -> None:
    """Raise this process's limit to what `process_name` needs. Raises UserError if the limit may not be that high."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= file_count:
        return
    if hard != resource.RLIM_INFINITY and hard < file_count:
        raise UserError(
            f"the limit of open files is {hard} here, and {process_name} needs {file_count}",
            fix=f"raise the limit with `ulimit -n {file_count}`",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (file_count, hard))
