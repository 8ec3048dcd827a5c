"""The batch script of a Slurm job for a run file.

Pure: nothing is looked up, started or written here. Facts about the cluster are passed as a `Placement`. `ortflow
render --backend slurm` prints the script, and the launcher submits the same text.
"""

from ortflow.manifests.slurm.launch import launch, settings
from ortflow.manifests.slurm.placement import Placement
from ortflow.manifests.slurm.script import script

__all__ = ["Placement", "launch", "script", "settings"]
