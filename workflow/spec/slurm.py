"""The run file's `backends.slurm` section: what a Slurm job needs beside `resources`.

Names are Slurm's own. Rules between keys, and the syntax of the texts, are checked in `checks.slurm`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field

from ortflow.workflow.spec.base import Section, Text, no_items, no_keys
from ortflow.workflow.spec.launcher_options import Forms, Keys, LauncherOptions

DirectiveName = Literal[
    "account", "begin", "constraint", "cpus-per-task", "dependency", "exclude", "exclusive", "gpus-per-node",
    "gpus-per-task", "gres", "job-name", "kill-on-invalid-dep", "mail-type", "mail-user", "mem", "mem-per-cpu", "nice",
    "nodelist", "open-mode", "partition", "qos", "requeue", "reservation", "signal", "time",
]  # fmt: skip
"""Directives that a site may reject; no run works without the others (nodes, ntasks-per-node, output, comment)."""

MailType = Literal[
    "NONE", "BEGIN", "END", "FAIL", "REQUEUE", "ALL", "INVALID_DEPEND", "STAGE_OUT", "TIME_LIMIT", "TIME_LIMIT_90",
    "TIME_LIMIT_80", "TIME_LIMIT_50", "ARRAY_TASKS",
]  # fmt: skip


class Mail(Section):
    """When Slurm writes a mail, and to whom."""

    types: list[MailType] = Field(default_factory=no_items)
    """Events, as Slurm names them."""
    user: Text | None = None
    """Receiver; by default the user who submits."""


class Container(Section):
    """Image in which the ranks run; the rest of the job runs outside."""

    kind: Literal["none", "apptainer", "singularity", "enroot", "pyxis"] = "apptainer"
    """Container runtime: `pyxis` is srun's plug-in, `none` disables the container."""
    image: Text
    """Image file, relative to the run file, or a name that `kind` can resolve."""
    mounts: list[Text] = Field(default_factory=no_items)
    """Folders to mount besides run directory, model and data: `PATH`, `PATH:INSIDE` or `PATH:INSIDE:ro`."""
    arguments: list[Text] = Field(default_factory=no_items)
    """More arguments, each as --flag or --flag=value."""


class SlurmBackend(LauncherOptions):
    """Options of Slurm; nodes, cores, GPUs, memory and time are in `resources`."""

    FORMS = Forms(
        sections={("container",): "image"},
        commands=(("srun_arguments",), ("directives",)),
        lines=(("prologue",), ("epilogue",)),
        stand_ins={("container", "image"): "-"},
        reserved=("slurm",),
    )

    partition: Text | None = None
    """Partition, or several with commas."""
    # A wrong account or QOS is refused only where the site enforces them (AccountingStorageEnforce): elsewhere the job
    # runs all the same (22.05.8).
    account: Text | None = None
    """Account that is charged."""
    qos: Text | None = None
    """Quality of service."""
    constraint: Text | None = None
    """Features that nodes must have, such as a100&ib."""
    reservation: Text | None = None
    """Reservation that the job may use."""
    exclusive: bool = False
    """Use nodes exclusively."""
    nodelist: Text | None = None
    """Nodes that the job must have, such as node[1-4,7]: it waits while one of them is down."""
    exclude: Text | None = None
    """Nodes that the job must not have."""
    # sbatch also takes the id of a job that Slurm no longer knows, and starts this one at once (22.05.8).
    dependency: Text | None = None
    """Jobs to wait for, in Slurm's syntax: afterok:123."""
    begin: Text | None = None
    """Earliest start, in Slurm's syntax: now+1hour, 22:00 or 2030-01-31T08:00."""
    nice: Annotated[int, Field(ge=-10000, le=10000)] | None = None
    """Niceness of the job: a value above 0 lowers its priority."""
    job_name: Text | None = None
    """Name of the job; by default the run's name."""
    mail: Mail = Mail.model_construct()
    """Mails from Slurm."""
    # Under srun, --gpus-per-node and --gres show all GPUs of the node to each rank (Slurm 22.05).
    gpus_as: Literal["gpus-per-task", "gpus-per-node", "gres"] = "gpus-per-task"
    """Directive for the GPUs of `resources.gpus_per_rank`, as the site requires."""
    gres: Text | None = None
    """Generic resources of a node, in Slurm's syntax; with `gpus_as: gres` also its GPUs by type: gpu:a100:4."""
    gpu_bind: Text | None = None
    """Which GPUs a rank sees, as srun's --gpu-bind; by default Slurm decides (with `gpus-per-task`, the rank's own)."""
    memory_per: Literal["node", "cpu"] = "node"
    """Whether `resources.memory` is requested as --mem, or divided by the cores of a node's ranks as --mem-per-cpu."""
    # Of itself, Slurm requeues neither after the time limit nor after a failure of the program (22.05.8).
    requeue: bool = True
    """Let Slurm requeue the job after a preemption or the loss of a node."""
    # Slurm may signal up to a minute early (man sbatch): 30 s ahead, the signal came 36 to 60 s before the end
    # (22.05.8).
    signal_seconds: Annotated[int, Field(ge=1, le=65535)] = 90
    """Seconds before the time limit at which the ranks are asked to save, at most half of the time left; follows a
    limit that is changed while the job runs."""
    # The wrong one is silent: MPICH 5.0.2 and Open MPI 5.0.11 under none, and Open MPI under pmi2, make each rank a
    # world of its own, and all exit with 0 (Slurm 22.05.8). MPICH needs pmi2: under pmix it aborts.
    mpi: Literal["auto", "pmi2", "pmix", "none", "mpirun"] = "auto"
    """How the ranks are started: srun's --mpi, or an mpirun inside the job."""
    srun_arguments: list[Text] = Field(default_factory=no_items)
    """More arguments for srun, each as --flag or --flag=value."""
    directives: list[Text] = Field(default_factory=no_items)
    """More directives for sbatch, each as --flag or --flag=value."""
    additional_parameters: dict[Text, Text | int | float | Literal[True]] = Field(default_factory=no_keys)
    """More directives for sbatch by name, as in submitit: licenses: "matlab:1"; true for one without a value."""
    omit: list[DirectiveName] = Field(default_factory=no_items)
    """Directives to omit from the script."""
    prologue: list[Text] = Field(default_factory=no_items)
    """Shell lines before the ranks start: modules, a virtual environment."""
    epilogue: list[Text] = Field(default_factory=no_items)
    """Shell lines after the last rank has ended; not run when the job is requeued."""
    container: Container | None = None
    """The image that ranks run in; with one, `resources.python` is the image's (`python` if not given)."""
    python: Text | None = None
    """Interpreter of the supervisor on the compute node; by default the one that submits."""

    def input_keys(self) -> Iterable[Keys]:
        """The image, if it is a file."""
        container = self.container
        return [("container", "image")] if container is not None and is_image_file(container.image) else []


def is_image_file(image: str) -> bool:
    """Whether a container's image is a file, rather than a name in a registry or of an existing container."""
    return image.startswith(("/", "./", "../", "~/")) or ("://" not in image and image.endswith((".sif", ".sqsh")))
