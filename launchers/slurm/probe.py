"""How ranks connect in a job: the way to start them that fits their MPI and this Slurm. Starts no rank.

A wrong way gives no error but separate worlds of size 1 (each rank also checks that), so it is chosen by what exists:
the MPI library beside the ranks' interpreter, as mpi4py would load it, and the plug-ins that srun can load.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ortflow.launchers.mpi import find_mpi, library_beside
from ortflow.launchers.slurm.commands import Slurm
from ortflow.manifests.local import MpiKind
from ortflow.manifests.slurm.container import inside
from ortflow.workflow.errors import OrtflowError, UserError

if TYPE_CHECKING:
    from ortflow.workflow.spec.run import RunSpec

EXPEDITE = (25, 11)
"""The first Slurm with --requeue=expedite."""
_FITTING: dict[MpiKind, Literal["pmi2", "pmix"]] = {"mpich": "pmi2", "openmpi": "pmix"}
"""srun's --mpi for each."""


@dataclass(frozen=True)
class Start:
    """How ranks are started inside the allocation."""

    how: Literal["pmi2", "pmix", "none", "mpirun"]
    """srun's --mpi, or mpirun."""
    mpirun: str | None = None
    """Absolute path, if it starts them."""
    kind: MpiKind | None = None
    """The kind of the ranks' MPI, if it can be detected."""


def choose_start(spec: RunSpec, python: str, slurm: Slurm, *, trusts: bool = True) -> Start:
    """How to start a run's ranks; `python` is their interpreter, and `trusts` as in `find_mpi`. Raises UserError if the
    request cannot be met.
    """
    settings = spec.backends.slurm
    setting = settings.mpi
    if setting != "auto" and setting != "mpirun":
        return Start(setting, kind=library_beside(python))
    if setting == "auto" and spec.world_size == 1:
        return Start("none")
    if setting == "auto" and inside(spec) is not None:
        # The image's MPI is not visible here. pmi2 is built into every Slurm and fits MPICH's wheel.
        return Start("pmi2")
    library = library_beside(python)
    mpi = None if library and setting == "auto" else find_mpi(python, library or "auto", trusts=trusts)
    kind = library or (mpi.kind if mpi else None)
    mode = _FITTING.get(kind) if kind else None
    if setting == "auto" and mode and _loads(slurm, mode):
        return Start(mode, kind=kind)
    mpi = mpi or find_mpi(python, kind or "auto", trusts=trusts)
    if mpi is not None:
        return Start("mpirun", mpi.executable, mpi.kind)
    raise UserError(
        f"{spec.world_size} ranks need an MPI, and there is none beside {python} or on the PATH",
        where="backends.slurm.mpi",
        fix=f"`{python} -m pip install 'ortflow[mpich]'`, or, if only the compute nodes have one, set it to pmi2 "
        "(MPICH) or pmix (Open MPI)",
    )


def supports_expedite(slurm: Slurm) -> bool:
    """Whether this Slurm, if there is one, restarts jobs immediately with --requeue=expedite."""
    try:
        return slurm.version() >= EXPEDITE
    except UserError:
        return False


def beside(ask: Callable[[], bool]) -> Callable[[], bool]:
    """The answer to a query that runs in the background; raises its OrtflowError."""
    results: list[bool | OrtflowError] = []

    def asked() -> None:
        try:
            results.append(ask())
        except OrtflowError as error:
            results.append(error)

    thread = threading.Thread(target=asked, daemon=True)
    thread.start()

    def answer() -> bool:
        thread.join()
        if isinstance(results[0], OrtflowError):
            raise results[0]
        return results[0]

    return answer


def _loads(slurm: Slurm, mode: str) -> bool:
    """Whether srun loads the plug-in; True without Slurm, when a script is only printed."""
    try:
        return slurm.starts_with(mode)
    except UserError:
        return True
