"""The run file as a whole, and the sections that say where and under which rules it runs."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from ortflow.workflow.errors import UserError
from ortflow.workflow.parallel.grid import Grid
from ortflow.workflow.spec.backends import Backends
from ortflow.workflow.spec.base import (
    Count,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Section,
    Text,
    no_items,
    no_keys,
)
from ortflow.workflow.spec.data import DataSection
from ortflow.workflow.spec.model import ModelSection
from ortflow.workflow.spec.notify import Notify
from ortflow.workflow.spec.profile import ProfileWindow
from ortflow.workflow.spec.program import ProgramSection
from ortflow.workflow.spec.sinks import Sink
from ortflow.workflow.spec.train import TrainSection
from ortflow.workflow.spec.tune import TuneSection


class TrainerSection(Section):
    """The trainer: `graph` for ONNX models, or one from a package."""

    name: Text = "graph"
    """`graph`, or a trainer installed for the ranks; docs/trainers.md explains how to write one."""
    options: dict[Text, Any] = Field(default_factory=no_keys)
    """Options of another trainer."""


class Parallel(Section):
    """Degrees of parallelism; their product is the world size."""

    data: Positive | None = None
    """Number of replicas; by default the world size divided by the other degrees."""
    pipeline: Positive = 1
    """Pipeline stages."""
    schedule: Literal["gpipe", "1f1b", "interleaved"] = "1f1b"
    """Order in which stages work: gpipe runs all forward passes first; 1f1b runs backward passes as soon as it can,
    which needs less memory; interleaved is 1f1b with several stages per rank."""
    chunks: Positive = 1
    """Stages of each rank, with the schedule interleaved."""
    cuts: list[list[Text]] | None = None
    """Tensors at which the model is cut into stages, one list per cut; by default places are found that balance the
    stages."""
    horizontal: Positive = 1
    """Ranks that share one layer (tensor parallelism)."""
    whole: list[Text] = Field(default_factory=no_items)
    """Glob patterns of weights that each of these ranks holds whole."""
    columns: list[Text] = Field(default_factory=no_items)
    """Glob patterns of weights that are divided by columns, the outputs of their products. What no list names is found
    in the graph."""
    rows: list[Text] = Field(default_factory=no_items)
    """Glob patterns of weights that are divided by rows, the inputs of their products, which are then summed."""
    sequence_parallel: bool = False
    """Compute norms, dropout and additions between divided layers on a share of the tokens, which takes less memory."""
    zero: Literal[0, 1, 2, 3] = 0
    """ZeRO stage: 1 shards the optimizer's moments over the replicas, 2 also accumulated gradients, 3 also parameters
    and all gradients."""


class Keep(Section):
    """Which checkpoints are kept."""

    newest: Positive = 2
    """Number of newest checkpoints."""
    every: Positive | None = None
    """Also keep checkpoints whose step is a multiple of this, permanently."""


class Best(Section):
    """The checkpoint with the best result of an evaluation."""

    metric: Text = "loss"
    """Result to compare: loss, or a metric of `model.metrics` by its name in the results."""


class CheckpointSection(Section):
    """When the state is saved, where, and what is kept."""

    directory: Text = "checkpoints"
    """Folder, relative to the run directory. An absolute path is for this run alone."""
    every_steps: Positive | None = None
    """Period in steps. Without a period, a run saves every 300 seconds, or less often, so that saves are in progress
    for at most 5% of the time."""
    every_seconds: PositiveFloat | None = None
    """Period in seconds; whichever comes first if both are given."""
    keep: Keep = Keep.model_construct()
    """Which checkpoints are kept."""
    best: Best | None = None
    """Save after each evaluation with a better result than all before, keep that checkpoint until there is a better
    one, and export its model beside the last one, as NAME.best.onnx."""
    asynchronous: bool = True
    """Write in the background."""
    wait_for_room: NonNegativeFloat = 600.0
    """Seconds that a run waits for space on a full disk, at its end and between attempts, before it fails."""
    exact: bool = True
    """Refuse to resume if results would not be bit-identical: other kernels, another ONNX Runtime or training graph."""


class MonitorSection(Section):
    """How the run is reported."""

    every_steps: Positive = 10
    """Steps between lines of progress in the log."""
    tensorboard: bool = True
    """Write TensorBoard scalars."""
    tensorboard_directory: Text = "tensorboard"
    """Folder, relative to the run directory."""
    sinks: list[Sink] = Field(default_factory=no_items)
    """Services that get the metrics, too: prometheus, wandb, mlflow, opentelemetry. They cost no step, and a failure of
    one is a warning."""
    sinks_seconds: NonNegativeFloat = 10.0
    """Seconds that a run waits at its end for its sinks to send the last steps."""
    runtime_log: Literal["verbose", "info", "warning", "error", "fatal"] = "error"
    """ONNX Runtime's log level."""
    notify: list[Notify] = Field(default_factory=no_items)
    """Messages to commands or web addresses when the run has finished, failed or hung, and so on."""
    profile: ProfileWindow | None = None
    """Record where the time of some steps goes, operator by operator; other steps cost nothing. `ortflow profile` shows
    it."""


class ExportSection(Section):
    """The inference model made at the end."""

    path: Text = "export/model.onnx"
    """File, relative to the run directory."""
    tolerance: NonNegativeFloat | None = None
    """Largest difference from the trained model, absolute plus relative, on real samples; by default 1e-4, or the
    model's rounding if that is larger."""
    enabled: bool = True
    """Export after the last step."""
    optimize: bool = False
    """Also write `model.optimized.onnx`, with ONNX Runtime's fused operators, which other runtimes do not have."""
    quantize: Literal["int8", "fp16"] | None = None
    """Also write `model.int8.onnx` or `model.fp16.onnx`: smaller, and measured on real samples against the exported
    model. A model with convolutions is calibrated on them."""
    quantize_tolerance: NonNegativeFloat = 0.05
    """Largest difference of the quantised model's outputs, relative to the root of their mean square; beyond it the
    model is refused."""
    metric_tolerance: NonNegativeFloat = 0.02
    """How much worse the metric may be with the optimised or quantised model, relative to its value with the exported
    one; beyond it the model is refused. It is that of `checkpoint.best`, else the first of `model.metrics`, else the
    loss."""


class HandedOver(ExportSection):
    """What a program hands over at its end; ortflow records it and does not make it."""

    path: Text = "export"
    """File or folder, relative to the run directory."""


class Resources(Section):
    """The resources of a run."""

    nodes: Positive = 1
    """Machines."""
    min_nodes: Positive | None = None
    """Smallest number of machines that an elastic run continues with when some are lost; by default the run always has
    `nodes`."""
    spares: Count = 0
    """Machines in reserve: they are asked for with the others, hold no rank, and take the place of one that is lost or
    too slow, without another wait in the queue."""
    ranks_per_node: Positive = 1
    """Ranks on each."""
    cpus_per_rank: Positive | None = None
    """Cores of a rank; by default an equal share of the machine's cores."""
    gpus_per_rank: Count = 0
    """GPUs of a rank: 1 to train on the GPU of the local rank, 0 for the CPU."""
    gpu_type: Text | None = None
    """GPU type, by the scheduler's name: h100 in Slurm, in Kubernetes the value of `gpu.type_label`."""
    memory: Text | None = None
    """Memory of a node: a number and a unit, such as 16G or 16Gi."""
    time_limit: Text | None = None
    """Wall-clock limit: [days-]hours:minutes:seconds, or minutes."""
    kernels: Literal["auto", "onnxruntime"] = "auto"
    """Kernels: ortflow's if a C compiler is found (auto), or only ONNX Runtime's."""
    cuda_graph: bool = True
    """On GPUs, capture the repeated work of a step as CUDA graphs, which saves host time."""
    python: Text | None = None
    """Interpreter of the ranks; by default the one that runs ortflow."""


class Backoff(Section):
    """Pause before a restart: doubled each time."""

    first: NonNegativeFloat = 1.0
    """Seconds before the first restart."""
    limit: NonNegativeFloat = 60.0
    """Longest pause in seconds."""


class Restart(Section):
    """How often a run is restarted, and how soon."""

    failures: Count = 3
    """Number of failures after which the run is restarted; the next one ends it."""
    preemptions: Count | None = None
    """Number of preemptions after which the run is restarted; no limit by default."""
    hung_seconds: PositiveFloat | None = 1800.0
    """Seconds without a heartbeat from rank 0 after which an attempt counts as hung, which is a failure; null disables
    the check. Ranks that start have at least 120 seconds until the first heartbeat."""
    shrink_seconds: NonNegativeFloat = 60.0
    """Seconds that an elastic run waits for missing nodes before it continues with fewer; Slurm decides that itself."""
    grow_seconds: PositiveFloat = 300.0
    """Seconds that an elastic run trains with fewer nodes before it saves and restarts with those that are back."""
    backoff: Backoff = Backoff.model_construct()
    """Pause before a restart."""


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
