"""How ranks find each other in a job: which start fits the MPI that they hold and this Slurm. Starts no rank.

A wrong start is not an error but silent worlds of one (each rank checks that, too), so it is chosen by what is there:
the MPI library beside the ranks' interpreter, as mpi4py would load it, and the plug-ins that srun can really load.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ortflow.launchers.mpi import find_mpi
from ortflow.launchers.slurm.commands import Slurm
from ortflow.manifests.local import MpiKind
from ortflow.manifests.slurm.container import inside
from ortflow.workflow.errors import OrtflowError, UserError

if TYPE_CHECKING:
    from ortflow.workflow.spec.run import RunSpec

EXPEDITE = (25, 11)
"""The first Slurm that knows --requeue=expedite."""
_LIBRARIES: tuple[tuple[str, MpiKind], ...] = (("libmpi.so.12*", "mpich"), ("libmpi.so.40*", "openmpi"))
"""File names by which the two MPI ABIs are known."""
_FITTING: dict[MpiKind, Literal["pmi2", "pmix"]] = {"mpich": "pmi2", "openmpi": "pmix"}
"""srun's --mpi for each."""


@dataclass(frozen=True)
class Start:
    """How ranks are started inside the allocation."""

    how: Literal["pmi2", "pmix", "none", "mpirun"]
    """srun's --mpi, or mpirun."""
    mpirun: str | None = None
    """Absolute path, where it starts them."""
    kind: MpiKind | None = None
    """Whose MPI the ranks hold, as far as that is seen."""


def choose_start(spec: RunSpec, python: str, slurm: Slurm) -> Start:
    """The start for a run; `python` is the ranks' interpreter. Raises UserError where the wanted one cannot be had."""
    settings = spec.backends.slurm
    wanted = settings.mpi
    if wanted != "auto" and wanted != "mpirun":
        return Start(wanted, kind=library_beside(python))
    if wanted == "auto" and spec.world_size == 1:
        return Start("none")
    if wanted == "auto" and inside(spec) is not None:
        # What the image holds is not seen from here. pmi2 is built into every Slurm, and fits MPICH's wheel.
        return Start("pmi2")
    beside = library_beside(python)
    mpi = None if beside and wanted == "auto" else find_mpi(python, beside or "auto")
    kind = beside or (mpi.kind if mpi else None)
    how = _FITTING.get(kind) if kind else None
    if wanted == "auto" and how and _loads(slurm, how):
        return Start(how, kind=kind)
    mpi = mpi or find_mpi(python, kind or "auto")
    if mpi is not None:
        return Start("mpirun", mpi.executable, mpi.kind)
    raise UserError(
        f"{spec.world_size} ranks need an MPI, and there is none beside {python} or on the PATH",
        where="backends.slurm.mpi",
        fix=f"`{python} -m pip install 'ortflow[mpich]'`; or, where only the compute nodes have one, say which: "
        "pmi2 for MPICH, pmix for Open MPI",
    )


def library_beside(python: str) -> MpiKind | None:
    """Whose MPI library lies where mpi4py looks first: in lib/ of the interpreter's environment."""
    folder = Path(python).parent.parent / "lib"
    return next((kind for pattern, kind in _LIBRARIES if any(folder.glob(pattern))), None)


def knows_expedite(slurm: Slurm) -> bool:
    """Whether this Slurm, if there is one, restarts jobs at once with --requeue=expedite."""
    try:
        return slurm.version() >= EXPEDITE
    except UserError:
        return False


def beside(ask: Callable[[], bool]) -> Callable[[], bool]:
    """The answer to a question that is asked while other work is done; raises the OrtflowError that came of it."""
    told: list[bool | OrtflowError] = []

    def asked() -> None:
        try:
            told.append(ask())
        except OrtflowError as error:
            told.append(error)

    thread = threading.Thread(target=asked, daemon=True)
    thread.start()

    def answer() -> bool:
        thread.join()
        if isinstance(told[0], OrtflowError):
            raise told[0]
        return told[0]

    return answer


def _loads(slurm: Slurm, how: str) -> bool:
    """Whether srun loads the plug-in; where there is no Slurm (a script is only printed), as if it did."""
    try:
        return slurm.starts_with(how)
    except UserError:
        return True
