"""The command line and the environment that start a run's ranks on this machine.

Pure: nothing is looked up, started or written here. `ortflow.launchers.local` finds the interpreter and the MPI and
starts the command; `ortflow render` prints it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from typing_extensions import assert_never

if TYPE_CHECKING:
    from ortflow.workflow.spec.run import RunSpec


RANK_MODULE = "ortflow.workflow.rank"
FOREIGN = ("SLURM_", "PMI_", "PMIX_RANK", "PMIX_NAMESPACE", "PMIX_SERVER", "OMPI_COMM_WORLD_", "MPI_LOCAL", "HYDI_")
"""Variables of a job that this shell runs in: with them, a rank would join that job's world."""

MpiKind = Literal["mpich", "openmpi"]


@dataclass(frozen=True)
class Mpi:
    """The process manager of an MPI."""

    kind: MpiKind
    """mpich stands for every MPI whose process manager is Hydra."""
    executable: str


def command(spec: RunSpec, run_dir: Path, python: str, mpi: Mpi | None) -> list[str]:
    """The command that starts all ranks of the run; a single rank needs no mpirun."""
    rank = [python, "-m", RANK_MODULE, str(run_dir)]
    if spec.world_size == 1:
        return rank
    if mpi is None:
        raise ValueError(f"{spec.world_size} ranks need an MPI to start them")
    count = ["-n", str(spec.world_size)]
    arguments = spec.backends.local.arguments
    if mpi.kind == "mpich":
        # Without it Hydra resolves this machine's name, which fails on a laptop without a network.
        return [mpi.executable, "-localhost", "127.0.0.1", "-print-all-exitcodes", *arguments, *count, *rank]
    if mpi.kind == "openmpi":
        # Each rank pins its own threads. More ranks than cores is slow, not wrong.
        return [mpi.executable, "--oversubscribe", "--bind-to", "none", *arguments, *count, *rank]
    assert_never(mpi.kind)


def settings(spec: RunSpec, run_dir: Path, attempt: int, mpi: Mpi | None) -> dict[str, str]:
    """The variables that ortflow sets for mpirun and the ranks."""
    variables = {
        "ORTFLOW_RUN_DIR": str(run_dir),
        "ORTFLOW_ATTEMPT": str(attempt),
        "ORTFLOW_LAUNCHER": "local",
        "PYTHONUNBUFFERED": "1",
    }
    if spec.world_size > 1 and mpi is not None:
        # mpirun's ranks end with it. A rank without mpirun is bound to its supervisor before exec.
        variables["ORTFLOW_DIE_WITH_PARENT"] = "1"
        variables.update(_MPI_SETTINGS[mpi.kind])
    return variables


def environment(variables: Mapping[str, str], outer: Mapping[str, str], folder: str) -> dict[str, str]:
    """The complete environment of mpirun: the shell's (`outer`) without the variables of a surrounding job, then
    `variables`.

    MPI settings of the user take precedence over ortflow's defaults. Entries of PYTHONPATH are relative to the shell's
    `folder`, because ranks start elsewhere.
    """
    merged = {name: value for name, value in outer.items() if not name.startswith(FOREIGN)}
    for name, value in variables.items():
        if name.startswith("ORTFLOW_") or name not in merged:
            merged[name] = value
    if merged.get("PYTHONPATH"):
        merged["PYTHONPATH"] = absolute_entries(merged["PYTHONPATH"], folder)
    return merged


def absolute_entries(entries: str, folder: str) -> str:
    """PYTHONPATH with entries relative to `folder` made absolute."""
    # For an empty entry, as in `/opt/tools:`, Python would search the current folder before its own library.
    return os.pathsep.join(os.path.join(folder, entry) for entry in entries.split(os.pathsep) if entry)


_MPI_SETTINGS: dict[MpiKind, dict[str, str]] = {
    # All ranks are on this machine: nothing listens on a network.
    "mpich": {"FI_PROVIDER": "tcp", "FI_TCP_IFACE": "lo"},
    "openmpi": {
        "OMPI_MCA_btl_tcp_if_include": "lo",
        # Open MPI 4 would look for ssh, which it needs only for other machines, and fail if it is missing.
        "OMPI_MCA_plm": "isolated",
        "OMPI_MCA_pml": "ob1",
        # Its search for network hardware takes a second of each start.
        "OMPI_MCA_btl": "^ofi",
        # Waiting ranks yield the core if there are fewer cores than ranks.
        "OMPI_MCA_mpi_yield_when_idle": "1",
        # Containers often have no user but root; Open MPI 4 reads the first pair, 5 the second.
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_ALLOW_RUN_AS_ROOT": "1",
        "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    },
}
