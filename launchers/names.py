"""The built-in launchers: the one place that names them for the command line. Imports nothing."""

from __future__ import annotations

BUILT_IN = {
    "local": "local:LocalLauncher",
    "slurm": "slurm.launcher:SlurmLauncher",
    "kubernetes": "kubernetes.launcher:KubernetesLauncher",
}
"""Name -> class in `ortflow.launchers`, found without a search through all installed packages."""
HERE = "local"
"""Starts runs on this machine: the launcher of `ortflow run`, and where no other is named."""
AT_LOGIN = "slurm"
"""The launcher of commands that are carried out on a login node with --host, where no other is named."""
