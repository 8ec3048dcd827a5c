"""Whether degrees of parallelism and the ZeRO stage fit ranks, device and each other. Pure; called by `check`."""

from __future__ import annotations

from collections.abc import Iterator

from ortflow.workflow.spec.problem import KeyPath, Problem
from ortflow.workflow.spec.run import TrainerRunSpec

ZERO: KeyPath = ("parallel", "zero")


def check_parallel(spec: TrainerRunSpec) -> Iterator[Problem]:
    """Every contradiction about the section `parallel`."""
    parallel, world = spec.parallel, spec.world_size
    degrees = {"data": parallel.data, "pipeline": parallel.pipeline, "horizontal": parallel.horizontal}
    product = (parallel.data or 1) * parallel.pipeline * parallel.horizontal
    if (product != world) if parallel.data is not None else (world % product != 0):
        fixed_degrees = {name: degree for name, degree in degrees.items() if degree is not None}
        sum_up = " x ".join(f"{name} {degree}" for name, degree in fixed_degrees.items())
        ranks = f"{spec.resources.nodes} x {spec.resources.ranks_per_node} = {world} ranks"
        message = f"does not fit the world size: {sum_up} = {product}, and resources has {ranks}"
        largest = max(fixed_degrees, key=lambda name: fixed_degrees[name])
        related_keys = (
            ("resources", "nodes"),
            ("resources", "ranks_per_node"),
            *(("parallel", name) for name in degrees),
        )
        yield Problem(("parallel", largest), message, "change one of them", others=related_keys)
    if spec.divides:
        yield from _divided(spec)
    if parallel.pipeline == 1:
        for name, value, default in (("schedule", parallel.schedule, "1f1b"), ("cuts", parallel.cuts, None)):
            if value != default:
                yield Problem(("parallel", name), "applies only to a pipeline, and parallel.pipeline is 1", "remove it")
    if parallel.horizontal == 1:
        for name in ("whole", "columns", "rows"):
            if getattr(parallel, name):
                message = "applies only to divided layers, and parallel.horizontal is 1"
                fix = "remove it, or set horizontal above 1"
                yield Problem(("parallel", name), message, fix, others=(("parallel", "horizontal"),))
        if parallel.sequence_parallel:
            message = "is true, which applies only to divided layers, and parallel.horizontal is 1"
            fix = "remove it, or set horizontal above 1"
            yield Problem(("parallel", "sequence_parallel"), message, fix, others=(("parallel", "horizontal"),))
    yield from _chunks(spec)
    if parallel.zero:
        yield from _zero(spec)


def _divided(spec: TrainerRunSpec) -> Iterator[Problem]:
    """What a model that the ranks divide excludes."""
    parallel = spec.parallel
    name, degree = ("pipeline", parallel.pipeline) if parallel.pipeline > 1 else ("horizontal", parallel.horizontal)
    path: KeyPath = ("parallel", name)
    yield from _other_trainer(spec, path, degree, 1, "a model is divided by")
    if spec.trainer.name == "graph" and spec.model is not None:
        for graph, graph_path in spec.model.graphs.model_dump().items():
            if graph_path:
                message = f"is {degree}, and model.graphs.{graph} is of the whole model"
                yield Problem(path, message, "remove one of them", others=(("model", "graphs", graph),))
    if parallel.horizontal > 1 and spec.resources.kernels == "onnxruntime":
        message = (
            f"is {parallel.horizontal}, and parts are summed by ortflow's kernels: resources.kernels is onnxruntime"
        )
        related_keys: tuple[KeyPath, ...] = (("resources", "kernels"),)
        yield Problem(
            ("parallel", "horizontal"), message, "set it to 1, or resources.kernels to auto", others=related_keys
        )
    if parallel.pipeline > 1 and parallel.zero == 2:
        message = "is 2, and a stage adds up the gradients of several micro-batches at a time: parallel.pipeline is "
        yield Problem(ZERO, f"{message}{parallel.pipeline}", "set it to 1", others=(("parallel", "pipeline"),))


def _chunks(spec: TrainerRunSpec) -> Iterator[Problem]:
    parallel, stages = spec.parallel, spec.parallel.pipeline * spec.parallel.chunks
    if (parallel.chunks > 1) != (parallel.schedule == "interleaved"):
        message = f"is {parallel.chunks}, and parallel.schedule is {parallel.schedule}"
        fix = "set schedule to interleaved and chunks above 1, or remove both"
        yield Problem(("parallel", "chunks"), message, fix, others=(("parallel", "schedule"),))
    if parallel.cuts is not None and parallel.pipeline > 1 and len(parallel.cuts) != stages - 1:
        message = f"has {len(parallel.cuts)} cuts, and parallel.pipeline {parallel.pipeline}"
        message += f" x parallel.chunks {parallel.chunks}" if parallel.chunks > 1 else ""
        related_keys: tuple[KeyPath, ...] = (("parallel", "pipeline"), ("parallel", "chunks"))
        yield Problem(
            ("parallel", "cuts"),
            f"{message} needs {stages - 1}",
            "list one cut between two stages",
            others=related_keys,
        )


def _zero(spec: TrainerRunSpec) -> Iterator[Problem]:
    stage = spec.parallel.zero
    if stage == 3 and spec.resources.kernels == "onnxruntime":
        message = "is 3, and parameters are fetched by ortflow's kernels: resources.kernels is onnxruntime"
        yield Problem(ZERO, message, "set it to 2, or resources.kernels to auto", others=(("resources", "kernels"),))
    for name, degree in (("pipeline", spec.parallel.pipeline), ("horizontal", spec.parallel.horizontal)):
        if stage == 3 and degree > 1:
            message = (
                f"is 3, which shards whole layers, and parallel.{name} is {degree}, which divides the model itself"
            )
            yield Problem(ZERO, message, "set it to 1", others=(("parallel", name),))
    yield from _other_trainer(spec, ZERO, stage, 0, "sharding is defined by")
    graphs = spec.model.graphs if spec.trainer.name == "graph" and spec.model is not None else None
    if graphs is not None and graphs.optimizer:
        message = f"is {stage}, and model.graphs.optimizer updates all parameters together"
        yield Problem(ZERO, message, "remove one of them", others=(("model", "graphs", "optimizer"),))
    elif graphs is not None and graphs.train and stage == 3:
        # ONNX Runtime checks gradients that it writes into a buffer, and not those that a node sends.
        message = "is 3, which needs a training graph that ortflow builds, and model.graphs.train is given"
        yield Problem(ZERO, message, "set it to 2, or remove the graph", others=(("model", "graphs", "train"),))


def _other_trainer(spec: TrainerRunSpec, path: KeyPath, value: int, off: int, by: str) -> Iterator[Problem]:
    """Refuse a key that only the trainer `graph` implements: its value, the one that turns it off, what others do."""
    if spec.trainer.name != "graph":
        message = f"is {value}, and {by} the trainer {spec.trainer.name}"
        yield Problem(path, message, f"set it to {off}", others=(("trainer", "name"),))
