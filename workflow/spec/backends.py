"""The sections of the built-in launchers, which every run has; no other module of the run file names them.

Sections of other launchers are added in `ortflow.workflow.spec.file.installed`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from ortflow.workflow.spec.base import Section, Text, no_items
from ortflow.workflow.spec.kubernetes import KubernetesBackend
from ortflow.workflow.spec.launcher_options import Forms, Keys, LauncherOptions
from ortflow.workflow.spec.slurm import SlurmBackend


class LocalBackend(LauncherOptions):
    """Options of the local backend."""

    FORMS = Forms(commands=(("arguments",),))

    mpi: Literal["auto", "mpich", "openmpi"] = "auto"
    """The MPI whose mpirun starts the ranks."""
    arguments: list[Text] = Field(default_factory=no_items)
    """More arguments for mpirun."""


class Backends(Section):
    """Options of single backends."""

    local: LocalBackend = LocalBackend.model_construct()
    """This machine."""
    slurm: SlurmBackend = SlurmBackend.model_construct()
    """A Slurm cluster."""
    kubernetes: KubernetesBackend = KubernetesBackend.model_construct()
    """A Kubernetes cluster with Kubeflow's mpi-operator."""


BUILT_IN: dict[str, type[LauncherOptions]] = {
    name: kind
    for name, field in Backends.model_fields.items()
    if isinstance(kind := field.annotation, type) and issubclass(kind, LauncherOptions)
}
"""Name -> section."""


def sections_of(backends: Backends) -> Iterator[tuple[Keys, LauncherOptions]]:
    """Each launcher's section of a run, with its key path."""
    for name in type(backends).model_fields:
        section = getattr(backends, name)
        if isinstance(section, LauncherOptions):
            yield ("backends", name), section
