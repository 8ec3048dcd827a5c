"""Rules between the sections of a run file. Pure: opens no file and queries no device.

Called by `load`, and by Python code that builds a RunSpec. Each check is a generator of problems; a problem names the
other keys it depends on, so that an error in one of them is not reported twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import PurePosixPath

from ortflow.workflow.errors import UserError
from ortflow.workflow.spec.backends import BUILT_IN, sections_of
from ortflow.workflow.spec.checks.average import check_average
from ortflow.workflow.spec.checks.batch import undivided
from ortflow.workflow.spec.checks.elastic import check_elastic
from ortflow.workflow.spec.checks.gpu_updates import only_whole_on_gpus
from ortflow.workflow.spec.checks.gpus import check_gpus
from ortflow.workflow.spec.checks.groups import check_groups
from ortflow.workflow.spec.checks.kubernetes import check_kubernetes
from ortflow.workflow.spec.checks.notify import check_notify
from ortflow.workflow.spec.checks.objective import check_objective
from ortflow.workflow.spec.checks.parallel import check_parallel
from ortflow.workflow.spec.checks.profile import check_profile
from ortflow.workflow.spec.checks.program import check_program
from ortflow.workflow.spec.checks.schedule import check_schedule
from ortflow.workflow.spec.checks.slurm import check_slurm
from ortflow.workflow.spec.checks.sync import check_sync
from ortflow.workflow.spec.checks.tables import check_tables
from ortflow.workflow.spec.checks.transforms import check_transforms
from ortflow.workflow.spec.checks.tune import check_tune
from ortflow.workflow.spec.data import DataSet
from ortflow.workflow.spec.mapping import parse_reference
from ortflow.workflow.spec.optimizers import OPTIMIZERS, Lion, Sgd
from ortflow.workflow.spec.problem import KeyPath, Problem
from ortflow.workflow.spec.run import RunSpec, TrainerRunSpec
from ortflow.workflow.spec.train import HALF_PRECISIONS
from ortflow.workflow.spec.units import parse_memory, parse_time

GRAPH = "graph"
"""The built-in trainer, for ONNX graphs."""


def check(spec: RunSpec) -> list[Problem]:
    """Report every contradiction within a run file."""
    problems = [problem for find in OF_TRAINERS for problem in find(spec)] if isinstance(spec, TrainerRunSpec) else []
    return problems + [problem for find in CHECKS for problem in find(spec)]


def _trainer(spec: TrainerRunSpec) -> Iterator[Problem]:
    model, name = ("model",), ("trainer", "name")
    if spec.trainer.name != GRAPH and spec.model is not None:
        message = f"is for the trainer {GRAPH}, and trainer.name is {spec.trainer.name}"
        yield Problem(model, message, "remove one of them", others=(name,))
    elif spec.trainer.name == GRAPH and spec.model is None:
        yield Problem(model, "is missing", "add it (the model and its loss)", others=(name,))
    if spec.trainer.name == GRAPH and spec.trainer.options:
        message = f"the trainer {GRAPH} has no options"
        yield Problem(("trainer", "options"), message, "remove them", others=(name,))


def _length(spec: TrainerRunSpec) -> Iterator[Problem]:
    steps, epochs = ("train", "steps"), ("train", "epochs")
    if spec.train.steps is None and spec.train.epochs is None:
        yield Problem(steps, "is missing, like train.epochs", "use one of them", others=(epochs,))
    if spec.train.steps is not None and spec.train.epochs is not None:
        fix = "use one of them (train.epochs=null on the command line removes the other)"
        yield Problem(steps, "cannot be combined with train.epochs", fix, others=(epochs,))


def _global_batch(spec: TrainerRunSpec) -> Iterator[Problem]:
    trouble = undivided(spec.global_batch, spec.data.micro_batch, spec.grid)
    if trouble is not None:
        ranks = ("resources", "nodes"), ("resources", "ranks_per_node")
        related_keys = (("data", "micro_batch"), *ranks, ("train", "gradient_accumulation"))
        yield Problem(("train", "global_batch"), trouble.what, trouble.fix, others=related_keys)


def _optimizer(spec: TrainerRunSpec) -> Iterator[Problem]:
    optimizer = spec.train.optimizer
    if isinstance(optimizer, Sgd) and optimizer.nesterov and optimizer.momentum == 0:
        path, momentum = ("train", "optimizer", "nesterov"), ("train", "optimizer", "momentum")
        yield Problem(path, "needs momentum", "give train.optimizer.momentum, such as 0.9", others=(momentum,))
    if OPTIMIZERS[optimizer.name].shapes:
        path, name = ("train", "optimizer", "name"), optimizer.name
        if not spec.parallel.zero and spec.parallel.horizontal == 1:
            yield from only_whole_on_gpus(spec, path, f"is {name}, which is")
        if spec.parallel.zero:
            message = f"is {name}, which needs whole tensors, and parallel.zero divides them over ranks"
            yield Problem(path, message, "set parallel.zero to 0", others=(("parallel", "zero"),))
        if spec.parallel.horizontal > 1:
            message = f"is {name}, which needs whole tensors, and parallel.horizontal divides them over ranks"
            fix = "set parallel.horizontal to 1; stages of a pipeline have whole tensors"
            yield Problem(path, message, fix, others=(("parallel", "horizontal"),))
    if isinstance(optimizer, Lion) and optimizer.betas[1] == 0:
        second = ("train", "optimizer", "betas", 1)
        yield Problem(second, "is 0, and Lion's moment needs a decay rate above 0", "give a number such as 0.99")


def _evaluation(spec: TrainerRunSpec) -> Iterator[Problem]:
    data_eval, period = ("data", "eval"), ("train", "evaluation", "every_steps")
    if spec.data.eval is None:
        if spec.data.eval_sets:
            yield Problem(("data", "eval_sets"), "needs a first evaluation set", "give data.eval", others=(data_eval,))
        if spec.train.evaluation.every_steps is not None:
            yield Problem(period, "needs an evaluation set", "give data.eval", others=(data_eval,))
        if spec.train.early_stop is not None:
            yield Problem(("train", "early_stop"), "needs an evaluation set", "give data.eval", others=(data_eval,))
    elif spec.train.early_stop is not None and spec.train.evaluation.every_steps is None:
        fix = "give train.evaluation.every_steps"
        yield Problem(("train", "early_stop"), "needs periodic evaluation", fix, others=(period,))


def _recompute(spec: TrainerRunSpec) -> Iterator[Problem]:
    if spec.model is not None and spec.model.recompute and spec.model.graphs.train:
        message = "applies to the training graph that ortflow builds, and model.graphs.train replaces it"
        yield Problem(("model", "recompute"), message, "remove one of them", others=(("model", "graphs", "train"),))


def _lora(spec: TrainerRunSpec) -> Iterator[Problem]:
    if spec.model is not None and spec.model.lora is not None:
        for key, path in spec.model.graphs.model_dump().items():
            if path and key != "optimizer":
                message = f"adapts the graphs that ortflow builds, and model.graphs.{key} replaces one"
                yield Problem(("model", "lora"), message, "remove one of them", others=(("model", "graphs", key),))


def _columns(spec: TrainerRunSpec) -> Iterator[Problem]:
    sets: list[tuple[KeyPath, DataSet | None]] = [(("train",), spec.data.train), (("eval",), spec.data.eval)]
    sets += [(("eval_sets", name), data_set) for name, data_set in spec.data.eval_sets.items()]
    for path, data_set in sets:
        for name, text in (data_set.references if data_set is not None else {}).items():
            try:
                parse_reference(text)
            except UserError as error:
                yield Problem(("data", *path, "columns", name), error.what, error.fix)


def _device(spec: TrainerRunSpec) -> Iterator[Problem]:
    if spec.train.precision != "fp32" and not spec.on_gpus:
        message = f"is {spec.train.precision}, which needs a GPU, and resources.gpus_per_rank is 0"
        yield Problem(("train", "precision"), message, "set it to fp32", others=(("resources", "gpus_per_rank"),))
    if spec.train.loss_scale != "dynamic" and spec.train.precision != "fp16":
        message = f"is {spec.train.loss_scale:g}, and only training in fp16 scales its loss"
        yield Problem(("train", "loss_scale"), message, "leave it out", others=(("train", "precision"),))
    if spec.train.precision in HALF_PRECISIONS:
        path, message = ("train", "precision"), f"is {spec.train.precision}, which needs ortflow's kernels"
        if spec.resources.kernels != "auto":
            kernels_message = f"{message}, and resources.kernels is {spec.resources.kernels}"
            yield Problem(path, kernels_message, "set resources.kernels to auto", others=(("resources", "kernels"),))
        if spec.model is not None and spec.onnx_model.graphs.train:
            graph_message = f"is {spec.train.precision}, and model.graphs.train is trained unchanged"
            yield Problem(path, graph_message, "set it to fp32 or tf32", others=(("model", "graphs", "train"),))
    if spec.resources.gpus_per_rank > 1:
        message = f"is {spec.resources.gpus_per_rank}, and a rank uses at most one GPU"
        yield Problem(("resources", "gpus_per_rank"), message, "set it to 1, and raise resources.ranks_per_node")


def _resources(spec: RunSpec) -> Iterator[Problem]:
    for key, text, parse in (
        ("memory", spec.resources.memory, parse_memory),
        ("time_limit", spec.resources.time_limit, parse_time),
    ):
        if text is not None:
            try:
                parse(text)
            except UserError as error:
                yield Problem(("resources", key), error.what, error.fix)


def _backoff(spec: RunSpec) -> Iterator[Problem]:
    first, limit = spec.restart.backoff.first, spec.restart.backoff.limit
    if first > limit:
        path, other = ("restart", "backoff", "first"), ("restart", "backoff", "limit")
        yield Problem(
            path, f"is {first:g} seconds, longer than the limit of {limit:g}", "raise the limit", others=(other,)
        )


def _inputs(spec: RunSpec) -> Iterator[tuple[KeyPath, str | None]]:
    yield ("model", "path"), spec.model.path if spec.model is not None else None
    if spec.data is not None:
        for name, data_set in (("train", spec.data.train), ("eval", spec.data.eval)):
            for path in data_set.paths if data_set is not None else ():
                yield ("data", name, "path"), path
    if spec.program is not None:
        yield ("program", "script"), spec.program.script
        yield ("program", "cwd"), spec.program.cwd


def _names(spec: RunSpec) -> Iterator[Problem]:
    """Check that no component of a path is longer than file systems allow."""
    paths: list[tuple[KeyPath, str | None]] = [
        (("run_dir",), spec.run_dir),
        *_inputs(spec),
        (("checkpoint", "directory"), spec.checkpoint.directory),
        (("monitor", "tensorboard_directory"), spec.monitor.tensorboard_directory),
        (("export", "path"), spec.export.path),
    ]
    for path, text in paths:
        longest = max(PurePosixPath(text or "").parts, key=lambda part: len(part.encode()), default="")
        if len(longest.encode()) > LONGEST_NAME:
            message = f"contains a name of {len(longest.encode())} bytes ({longest[:20]}…)"
            yield Problem(path, message, f"the limit is {LONGEST_NAME}: use a shorter one")


def _places(spec: RunSpec) -> Iterator[Problem]:
    """Check that outputs are inside the run directory, each at its own path, or given as absolute paths."""
    places = [
        (("checkpoint", "directory"), spec.checkpoint.directory),
        (("monitor", "tensorboard_directory"), spec.monitor.tensorboard_directory),
        (("export", "path"), spec.export.path),
    ]
    keys_by_place: dict[PurePosixPath, tuple[str, ...]] = {}
    checkpoints = PurePosixPath(spec.checkpoint.directory)
    for path, text in places:
        place = PurePosixPath(text)
        if ".." in place.parts:
            message = f"is outside the run directory ({text})"
            yield Problem(path, message, "give a path inside it, or an absolute one")
        elif not place.parts or place.parts[0] in RESERVED or place.parts[0].endswith(DAMAGED):
            yield Problem(path, f"is {text}, which is reserved in the run directory", "give another name")
        elif place in keys_by_place:
            other = keys_by_place[place]
            yield Problem(
                path, f"is {text}, and so is {'.'.join(other)}", "use a different one for each", others=(other,)
            )
        elif checkpoints.parts and checkpoints in place.parents:
            yield Problem(path, f"is {text}, inside checkpoint.directory", "use a path beside it")
        keys_by_place.setdefault(place, path)


def _launchers(spec: RunSpec) -> Iterator[Problem]:
    """Run the checks of launchers from packages; built-in launchers are checked below."""
    for path, section in sections_of(spec.backends):
        yield from section.problems(spec, path)


RESERVED = frozenset(
    {
        *("run.yaml", "plan.json", "attempts.jsonl", "events", "logs", "graphs", ".launcher", ".lost_nodes"),
        "program",
        *(".launcher.lock", ".ranks.lock", ".log_replicator.lock", ".stop", ".owner", ".run_supervisor", ".heartbeat"),
        *(name for options in BUILT_IN.values() for name in options.FORMS.reserved),
    }
)
"""Names in the run directory that the user must not use."""
DAMAGED = ".damaged"
"""Suffix of files with damaged records."""

LONGEST_NAME = 255
"""Longest file name in bytes, on all common file systems."""

OF_TRAINERS: tuple[Callable[[TrainerRunSpec], Iterator[Problem]], ...] = (
    _trainer,
    _length,
    _global_batch,
    check_schedule,
    check_groups,
    check_average,
    _optimizer,
    _evaluation,
    check_objective,
    _columns,
    check_parallel,
    check_sync,
    check_tables,
    _recompute,
    _lora,
    _device,
    check_transforms,
    check_tune,
)

CHECKS: tuple[Callable[[RunSpec], Iterator[Problem]], ...] = (
    check_program,
    check_elastic,
    _resources,
    check_gpus,
    _backoff,
    _places,
    _names,
    check_slurm,
    check_kubernetes,
    check_notify,
    check_profile,
    _launchers,
)
