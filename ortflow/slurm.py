"""Runs on Slurm from Python, as users of submitit know it: docs/slurm.md. Needs `ortflow[slurm]`."""

try:
    import submitit  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "submitit":
        raise
    words = "this needs submitit, which is not installed: install it with `pip install 'ortflow[slurm]'`"
    raise ModuleNotFoundError(words, name="submitit") from None

from ortflow.launchers.slurm.executor import SlurmExecutor
from ortflow.launchers.slurm.job import RunJob

__all__ = ["RunJob", "SlurmExecutor"]
