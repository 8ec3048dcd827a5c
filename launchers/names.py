"""The built-in launchers: the only place that names them for the command line. Imports nothing."""

from __future__ import annotations

BUILT_IN = {
    "local": "local:LocalLauncher",
    "slurm": "slurm.launcher:SlurmLauncher",
    "kubernetes": "kubernetes.launcher:KubernetesLauncher",
}
"""Name -> class in `ortflow.launchers`, found without a search of all installed packages."""
HERE = "local"
"""Starts runs on this machine: the launcher of `ortflow run`, and the default."""
AT_LOGIN = "slurm"
"""The default launcher of commands on a login node (--host)."""
