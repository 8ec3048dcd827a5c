"""Whether degrees of parallelism and the ZeRO stage fit ranks, device and each other. Pure; called by `check`."""

from __future__ import annotations

from collections.abc import Iterator

from ortflow.workflow.spec.problem import KeyPath, Problem
from ortflow.workflow.spec.run import RunSpec

NOT_YET = "is not available in this version"
ZERO: KeyPath = ("parallel", "zero")


def check_parallel(spec: RunSpec) -> Iterator[Problem]:
    """Every contradiction about the section `parallel`."""
    parallel, world = spec.parallel, spec.world_size
    degrees = {"data": parallel.data, "pipeline": parallel.pipeline, "horizontal": parallel.horizontal}
    product = (parallel.data or 1) * parallel.pipeline * parallel.horizontal
    if (product != world) if parallel.data is not None else (world % product != 0):
        given = {name: degree for name, degree in degrees.items() if degree is not None}
        sum_up = " x ".join(f"{name} {degree}" for name, degree in given.items())
        ranks = f"{spec.resources.nodes} x {spec.resources.ranks_per_node} = {world} ranks"
        what = f"does not fit the world size: {sum_up} = {product}, and resources has {ranks}"
        largest = max(given, key=lambda name: given[name])
        others = (("resources", "nodes"), ("resources", "ranks_per_node"), *(("parallel", name) for name in degrees))
        yield Problem(("parallel", largest), what, "change one of them", others=others)
    for name in ("pipeline", "horizontal"):
        if (degrees[name] or 1) > 1:
            yield Problem(("parallel", name), f"above 1 {NOT_YET}", "set it to 1")
    if parallel.zero:
        yield from _zero(spec)


def _zero(spec: RunSpec) -> Iterator[Problem]:
    stage = spec.parallel.zero
    if stage == 3 and spec.resources.kernels == "onnxruntime":
        what = "is 3, and parameters are fetched by ortflow's kernels: resources.kernels is onnxruntime"
        yield Problem(ZERO, what, "set one of them: 2, or auto", others=(("resources", "kernels"),))
    for name, degree in (("pipeline", spec.parallel.pipeline), ("horizontal", spec.parallel.horizontal)):
        if stage == 3 and degree > 1:
            what = f"is 3, which shards whole layers, and parallel.{name} is {degree}, which divides the model itself"
            yield Problem(ZERO, what, "set it to 2", others=(("parallel", name),))
    if spec.on_gpus:
        what = f"is {stage}, and ranks on GPUs cannot shard their state in this version: resources.gpus_per_rank"
        gpus = spec.resources.gpus_per_rank
        yield Problem(ZERO, f"{what} is {gpus}", "set it to 0", others=(("resources", "gpus_per_rank"),))
    if spec.trainer.name != "graph":
        what = f"is {stage}, and sharding is defined by the trainer {spec.trainer.name}"
        yield Problem(ZERO, what, "set it to 0", others=(("trainer", "name"),))
    elif spec.model is not None and spec.model.graphs.optimizer:
        what = f"is {stage}, and model.graphs.optimizer updates all parameters together"
        yield Problem(ZERO, what, "remove one of them", others=(("model", "graphs", "optimizer"),))
