"""The mpirun command that starts a run's ranks on the operator's hosts, over ssh. Pure.

The manifest does not contain this command: the supervisor process makes it for each attempt, because the image's MPI
and the launcher pod's address are known only in the pod.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import assert_never

from ortflow.manifests.local import RANK_MODULE, Mpi, MpiKind

if TYPE_CHECKING:
    from ortflow.workflow.spec.run import RunSpec

OWN = ("HOSTNAME", "HOME", "PWD", "OLDPWD", "SHLVL", "_", "TERM")
"""Variables of the launcher pod that ranks must not get."""
OPERATORS = ("KUBERNETES_", "HYDRA_", "I_MPI_HYDRA", "OMPI_MCA_orte_", "OMPI_MCA_plm_", "K_MPI_")
"""The operator's settings for mpirun, and a pod's settings for the API server."""

_HOST_ENTRIES: dict[MpiKind, str] = {"mpich": "{}:{}", "openmpi": "{} slots={}"}

DEFAULTS: dict[MpiKind, dict[str, str]] = {
    # Without SYS_PTRACE in the container, ranks of one pod may not read each other's memory, and MPI would fail.
    "mpich": {"MPIR_CVAR_CH4_CMA_ENABLE": "0", "UCX_TLS": "^cma", "UCX_POSIX_USE_PROC_LINK": "n"},
    "openmpi": {
        "OMPI_MCA_smsc": "^cma",
        "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
        # Waiting ranks yield the core to working ones if there are fewer cores than ranks.
        "OMPI_MCA_mpi_yield_when_idle": "1",
    },
}
"""Defaults; the container's own values take precedence."""


def ssh_options(port: int) -> list[str]:
    """Options of ssh between the pods of a run: their keys belong to the job and are made by the operator."""
    options = {
        # With such a file of known hosts ssh warns at each connection that it adds the key.
        "StrictHostKeyChecking": "no", "UserKnownHostsFile": "/dev/null", "LogLevel": "ERROR",
        "ConnectTimeout": "10", "ServerAliveInterval": "10", "ServerAliveCountMax": "6",
    }  # fmt: skip
    return ["-p", str(port), *(word for name, value in options.items() for word in ("-o", f"{name}={value}"))]


def hostfile(kind: MpiKind, hosts: Sequence[str], slots: int) -> str:
    """The hostfile in the format of the image's MPI, whatever MPI the operator assumes."""
    return "".join(_HOST_ENTRIES[kind].format(host, slots) + "\n" for host in hosts)


def command(
    spec: RunSpec, run_dir: Path, python: str, mpi: Mpi, hosts: Path, own_host: str, names: Sequence[str]
) -> list[str]:
    """The command that starts all ranks.

    `hosts` is the hostfile, `own_host` our address, `names` the ranks' variables.
    """
    rank = [python, "-m", RANK_MODULE, str(run_dir)]
    count, per_node = str(spec.world_size), str(spec.resources.ranks_per_node)
    if mpi.kind == "mpich":
        # Without -localhost the hosts look for this pod by a name that is not in DNS. All variables are passed.
        return [
            mpi.executable, "-localhost", own_host, "-launcher", "ssh", "-f", str(hosts), "-print-all-exitcodes",
            "-ppn", per_node, "-n", count, *rank,
        ]  # fmt: skip
    if mpi.kind == "openmpi":
        # Ranks start in a session of sshd, which has no variable of the container: Open MPI brings those of -x alone.
        carried = [word for name in names for word in ("-x", name)]
        return [
            # Open MPI 5 does not read the operator's OMPI_MCA_orte_default_hostfile (mpi-operator #842): all ranks
            # would start here.
            mpi.executable, "--hostfile", str(hosts), "--map-by", f"ppr:{per_node}:node", "--bind-to", "none",
            *carried, "-n", count, *rank,
        ]  # fmt: skip
    assert_never(mpi.kind)


def environment(variables: Mapping[str, str], outer: Mapping[str, str], mpi: Mpi, port: int) -> dict[str, str]:
    """The environment of mpirun and, as far as mpirun passes it on, of the ranks: the container's, then `variables`."""
    merged = dict(DEFAULTS[mpi.kind])
    merged |= {name: value for name, value in outer.items() if name not in OWN and not name.startswith(OPERATORS)}
    ssh = " ".join(ssh_options(port))
    if mpi.kind == "mpich":
        merged["HYDRA_LAUNCHER_EXTRA_ARGS"] = ssh
    elif mpi.kind == "openmpi":
        # Open MPI 5 reads the first of each pair, 4 the second.
        merged |= {"PRTE_MCA_plm_ssh_args": ssh, "OMPI_MCA_plm_rsh_args": ssh}
        # mpirun refuses root unless both variables of its pair are set.
        merged |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        merged |= {"PRTE_ALLOW_RUN_AS_ROOT": "1", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    else:
        assert_never(mpi.kind)
    return {**merged, **variables, "HOME": outer.get("HOME", "/")}
