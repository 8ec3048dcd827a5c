"""Runs on Slurm from Python, with the interface of submitit: docs/slurm.md. Needs `ortflow[slurm]`."""

try:
    import submitit  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "submitit":
        raise
    message = "this needs submitit, which is not installed: install it with `pip install 'ortflow[slurm]'`"
    raise ModuleNotFoundError(message, name="submitit") from None

from ortflow.launchers.slurm.executor import SlurmExecutor
from ortflow.launchers.slurm.job import RunJob

__all__ = ["RunJob", "SlurmExecutor"]
