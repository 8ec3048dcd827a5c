"""From a run file to the batch script of a Slurm job.

Pure: nothing is looked up, started or written here. What a cluster has to be asked for comes in as a `Placement`;
`ortflow render --backend slurm` prints the script, and the launcher submits the same text.
"""

from ortflow.manifests.slurm.launch import launch, settings
from ortflow.manifests.slurm.placement import Placement
from ortflow.manifests.slurm.script import script

__all__ = ["Placement", "launch", "script", "settings"]
