"""How ranks start inside a job: the command that the supervisor process runs as an attempt, and its variables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ortflow.manifests.local import RANK_MODULE
from ortflow.manifests.slurm import container
from ortflow.manifests.slurm.directives import counted, gpus_per_task
from ortflow.manifests.slurm.placement import Placement
from ortflow.workflow.errors import UserError

if TYPE_CHECKING:
    from ortflow.workflow.spec.run import RunSpec


def launch(spec: RunSpec, placement: Placement) -> list[str]:
    """The arguments after the supervisor process's `--`."""
    return [*starter(spec, placement), *rank(spec, placement)]


def starter(spec: RunSpec, placement: Placement) -> list[str]:
    """srun or mpirun, without the rank's command."""
    if placement.start == "mpirun":
        return _mpirun(spec, placement)
    if placement.start == "none" and spec.world_size > 1:
        raise ValueError(f"{spec.world_size} ranks need an MPI to start them")
    return _srun(spec, placement)


def sized(launch: Sequence[str], spec: RunSpec, names: Sequence[str] = ()) -> list[str]:
    """The arguments after the supervisor process's `--` for the nodes of an attempt, as in `spec`.

    srun's have no numbers in the script, mpirun's those of all nodes. `names`: the nodes, if the job has more of them.
    """
    if Path(launch[0]).name == "srun":
        # A step that has lost a node stays on record until the job's end (Slurm 22.05), and with it what it has taken.
        placing = [f"--nodelist={','.join(names)}", "--overlap"] if names else []
        return [launch[0], f"--nodes={spec.resources.nodes}", f"--ntasks={spec.world_size}", *placing, *launch[1:]]
    place = list(launch).index("-n") + 1
    per_node = spec.resources.ranks_per_node
    if "--map-by" in launch:  # Open MPI, which counts one slot for a host without a number
        placing = ["--host", ",".join(f"{name}:{per_node}" for name in names)]
    else:
        placing = ["-hosts", ",".join(names)]
    return [launch[0], *(placing if names else []), *launch[1:place], str(spec.world_size), *launch[place + 1 :]]


def rank(spec: RunSpec, placement: Placement) -> list[str]:
    """A rank, in its container if it has one."""
    arguments = [placement.rank_python]
    if container.inside(spec) is not None:
        # Paths of interpreters outside mean nothing inside, and neither does PYTHONPATH, if it is passed at all.
        code = ["env", f"PYTHONPATH={placement.code}"] if placement.code is not None else []
        arguments = [*code, spec.resources.python or "python"]
    return [*container.rank_prefix(spec, placement), *arguments, "-m", RANK_MODULE, str(placement.run_dir)]


def settings(spec: RunSpec, placement: Placement) -> dict[str, str]:
    """The variables that ortflow sets for srun, mpirun and the ranks, except the number of the attempt."""
    variables = {"ORTFLOW_RUN_DIR": str(placement.run_dir), "ORTFLOW_LAUNCHER": "slurm", "PYTHONUNBUFFERED": "1"}
    if spec.world_size > 1 and (placement.kind == "openmpi" or placement.start == "pmix"):
        variables.update(_OPENMPI)
    if placement.start == "mpirun":
        # Under sbatch --export=NONE, the srun inside mpirun would start its daemons without PATH. Overrides Slurm's
        # own.
        variables["SLURM_EXPORT_ENV"] = "ALL"
    return variables | container.settings(spec)


def _srun(spec: RunSpec, placement: Placement) -> list[str]:
    resources, slurm = spec.resources, spec.backends.slurm
    arguments = [
        "srun",
        f"--mpi={placement.start}",
        # Where attempts choose among nodes, the supervisor process adds both.
        *([] if spec.chooses_nodes else [f"--nodes={resources.nodes}", f"--ntasks={spec.world_size}"]),
        # The count alone may place 3 ranks on one of two nodes and 1 on the other.
        f"--ntasks-per-node={resources.ranks_per_node}",
    ]
    # Since Slurm 22.05, a step no longer inherits the job's request per task.
    if resources.cpus_per_rank is not None:
        arguments.append(f"--cpus-per-task={resources.cpus_per_rank}")
    if resources.gpus_per_rank:
        arguments += _gpus(spec, placement)
    # A rank that fails ends the others. One that is done does not, whatever the site's WaitTime: another may still
    # export. Under sbatch --export=NONE, ranks would otherwise not see the supervisor process's variables.
    arguments += ["--kill-on-bad-exit=1", "--wait=0", "--unbuffered", "--export=ALL"]
    return [*arguments, *slurm.srun_arguments, *container.srun_options(spec, placement)]


def _gpus(spec: RunSpec, placement: Placement) -> list[str]:
    resources, bind = spec.resources, spec.backends.slurm.gpu_bind
    arguments = []
    if gpus_per_task(spec, placement.start):
        arguments.append(f"--gpus-per-task={counted(spec, resources.gpus_per_rank)}")
        if resources.gpu_type is not None and bind is None:
            # Slurm 22.05 reads a type here as 0 GPUs to bind a task to: its ranks see no CUDA_VISIBLE_DEVICES.
            bind = "single:1"
    return arguments if bind is None else [*arguments, f"--gpu-bind={bind}"]


def _mpirun(spec: RunSpec, placement: Placement) -> list[str]:
    if placement.mpirun is None or placement.kind is None:
        raise ValueError("mpirun needs its path and its kind")
    box = container.inside(spec)
    if box is not None and box.kind == "pyxis":
        raise UserError(
            "is pyxis, an extension of srun, but this MPI is started with mpirun",
            where="backends.slurm.container.kind",
            fix="set backends.slurm.mpi to the one that the image's MPI supports: pmix (Open MPI) or pmi2 (MPICH)",
        )
    count, on_each = str(spec.world_size), str(spec.resources.ranks_per_node)
    if placement.kind == "mpich":
        return [placement.mpirun, "-print-all-exitcodes", "-n", count, "-ppn", on_each]
    # Each rank pins its own threads.
    return [placement.mpirun, "--map-by", f"ppr:{on_each}:node", "--bind-to", "none", "-n", count]


_OPENMPI = {
    # Waiting ranks yield the core if a site gives fewer cores than ranks.
    "OMPI_MCA_mpi_yield_when_idle": "1",
    # Open MPI 4 reads the first pair, 5 the second.
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}
