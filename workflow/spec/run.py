"""The run file as a whole, of a trainer or of a program. Its sections have a module each."""

from __future__ import annotations

from pydantic import Field

from ortflow.workflow.errors import UserError
from ortflow.workflow.parallel.grid import Grid
from ortflow.workflow.spec.backends import Backends
from ortflow.workflow.spec.base import Count, Section, Text, no_items
from ortflow.workflow.spec.checkpoint import CheckpointSection
from ortflow.workflow.spec.data import DataSection
from ortflow.workflow.spec.export import ExportSection, HandedOver
from ortflow.workflow.spec.model import ModelSection
from ortflow.workflow.spec.monitor import MonitorSection
from ortflow.workflow.spec.parallel import Parallel
from ortflow.workflow.spec.program import ProgramSection
from ortflow.workflow.spec.resources import Resources
from ortflow.workflow.spec.restart import Restart
from ortflow.workflow.spec.train import TrainSection
from ortflow.workflow.spec.trainer import TrainerSection
from ortflow.workflow.spec.tune import TuneSection


class RunSpec(Section):
    """One run file: of a training program (`ProgramRunSpec`), or of a trainer in ortflow (`TrainerRunSpec`)."""

    name: str = Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?$")
    """The run's name: lower-case letters, digits and hyphens, at most 52, a letter or digit first and last."""
    run_dir: Text | None = None
    """Run directory, relative to the current folder; runs/NAME if not given."""
    seed: Count = 0
    """Seed of the order of the samples and of dropout."""
    preflight: bool = False
    """Before the first step of each attempt, every machine computes, copies and exchanges data for about two seconds.
    One that is much slower than its peers is named, and takes part in no further attempt."""
    prepare: list[Text] = Field(default_factory=no_items)
    """Command that `ortflow run` runs once in the run file's folder if the model or the data does not exist."""
    program: ProgramSection | None = None
    """A training program, in place of `model`, `data` and `train`; docs/programs.md describes it."""
    trainer: TrainerSection = TrainerSection.model_construct()
    """The trainer."""
    model: ModelSection | None = None
    """The model and its loss; required for the trainer `graph`, and allowed only for it."""
    data: DataSection | None = None
    """The samples; required without `program`."""
    train: TrainSection | None = None
    """The optimisation; required without `program`."""
    tune: TuneSection | None = None
    """A search over keys of this file, for `ortflow tune`."""
    parallel: Parallel = Parallel.model_construct()
    """Degrees of parallelism."""
    checkpoint: CheckpointSection = CheckpointSection.model_construct()
    """Saving the state."""
    monitor: MonitorSection = MonitorSection.model_construct()
    """Events, TensorBoard, logs."""
    export: ExportSection = ExportSection.model_construct()
    """The inference model."""
    resources: Resources = Resources.model_construct()
    """Nodes, ranks, cores."""
    restart: Restart = Restart.model_construct()
    """Budgets."""
    backends: Backends = Backends.model_construct()
    """Options of single backends."""

    @property
    def on_gpus(self) -> bool:
        """Whether ranks train on GPUs."""
        return self.resources.gpus_per_rank > 0

    @property
    def kernels(self) -> str:
        """`resources.kernels`, for the device that ranks train on: ortflow's own are for the CPU."""
        return "onnxruntime" if self.on_gpus else self.resources.kernels

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.resources.nodes * self.resources.ranks_per_node

    @property
    def asked_nodes(self) -> int:
        """Machines that are asked for: those of the ranks, and those in reserve."""
        return self.resources.nodes + self.resources.spares

    @property
    def chooses_nodes(self) -> bool:
        """Whether each attempt takes some of the machines that are there."""
        return self.elastic or self.resources.spares > 0

    @property
    def elastic(self) -> bool:
        """Whether the number of nodes may change from attempt to attempt."""
        return self.resources.min_nodes is not None and self.resources.min_nodes < self.resources.nodes


class TrainerRunSpec(RunSpec):
    """A run that a trainer in ortflow's own processes trains: `graph` for ONNX models, or one from a package."""

    data: DataSection
    train: TrainSection

    @property
    def onnx_model(self) -> ModelSection:
        """`model`, for the trainer `graph`: `check` refuses a run of it that has none."""
        assert self.model is not None
        return self.model

    @property
    def synced_ranks(self) -> int:
        """Ranks over which the statistics of BatchNormalization run; 0 if each rank has its own."""
        return self.world_size if self.train.sync_batch_norm and self.world_size > 1 else 0

    @property
    def grid(self) -> Grid:
        """How the ranks divide model and samples; as many replicas as there are ranks for, whatever `parallel.data`."""
        ranks_per_replica = self.parallel.pipeline * self.parallel.horizontal
        return Grid(max(1, self.world_size // ranks_per_replica), self.parallel.pipeline, self.parallel.horizontal)

    @property
    def divides(self) -> bool:
        """Whether a rank holds only a part of the model's layers, or of its operators."""
        return self.parallel.pipeline > 1 or self.parallel.horizontal > 1

    @property
    def holds_whole(self) -> bool:
        """Whether each rank holds all parameters, gradients and moments, and one update graph writes them."""
        return not (self.parallel.zero or self.divides or self.train.offload != "none")

    @property
    def replicas(self) -> int:
        """Copies of the model; each takes its own samples."""
        return self.grid.data

    @property
    def global_batch(self) -> int:
        """Samples of an optimizer step over all ranks."""
        return self.train.global_batch or self.data.micro_batch * self.train.gradient_accumulation * self.replicas

    @property
    def accumulation(self) -> int:
        """Micro-batches a replica adds up before an optimizer step."""
        return self.global_batch // (self.data.micro_batch * self.replicas)


class ProgramRunSpec(RunSpec):
    """A run of a training program, which ortflow starts as a process of its own."""

    program: ProgramSection
    export: HandedOver = HandedOver.model_construct()


OF_TRAINERS = ("trainer", "model", "data", "train", "tune", "parallel")
"""Sections that a run of a program does not have."""


def trainer_run(spec: RunSpec, does: str = "this") -> TrainerRunSpec:
    """The run of a trainer. Raises UserError if the run is of a program; `does` is what is for models only."""
    if isinstance(spec, TrainerRunSpec):
        return spec
    raise UserError(
        f"{does} is for runs that ortflow trains itself, and {spec.name} is the run of a program",
        fix="docs/programs.md lists what works for programs",
    )
