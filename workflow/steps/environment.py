"""The record of what computes: made by step `runtime`, compared when a run goes on from a checkpoint."""

from __future__ import annotations

import platform
from pathlib import Path

import xxhash

from ortflow.workflow.checkpoint.manifest import Manifest
from ortflow.workflow.environment import ASKED, breaking, differences, merged
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.types import GraphSet, with_kernels_of
from ortflow.workflow.kernels.library import levels, library_for, source_key
from ortflow.workflow.onnx_runtime import onnxruntime
from ortflow.workflow.runtimes import installed_runtime
from ortflow.workflow.steps.context import Context


def environment_of_all(context: Context, threads: int) -> dict[str, str]:
    """The record of all ranks, on every rank."""
    settings = str(context.settings)
    mine = environment_of(context.graphs, context.spec.kernels, threads, context.trainer.processor, settings)
    records = context.world.gather(mine)
    record: dict[str, str] = context.world.share(merged(records) if records is not None else None)
    return record


def environment_of(graphs: GraphSet, kernels: str, threads: int, processor: str, settings: str) -> dict[str, str]:
    """What computes on this rank, in words and hashes."""
    library = library_for(kernels)
    ours = library.path if library is not None and with_kernels_of(graphs.train).exists() else None
    trained = [graphs.train, with_kernels_of(graphs.train), *([graphs.optimizer] if graphs.own_optimizer else [])]
    return {
        ASKED: kernels,
        "kernels": f"ortflow's ({source_key()[:8]})" if ours is not None else "ONNX Runtime's",
        "package": installed_runtime(),
        "onnxruntime": onnxruntime.__version__,
        "settings": settings,
        "graphs": _hash(trained),
        "device": processor,
        "instructions": next(iter(levels()), platform.machine()),
        "library": _hash([ours]) if ours is not None else "none",
        "threads": str(threads),
    }


def check_environment(context: Context, manifest: Manifest, place: Path) -> list[str]:
    """What differs from what the checkpoint was made with, in words.

    Raises UserError where the run promises to go on bit for bit and cannot.
    """
    before, now = manifest.environment, context.environment
    same_ranks = manifest.world_size == context.world.world_size
    broken = breaking(before, now, same_ranks=same_ranks) if context.spec.checkpoint.exact else []
    if broken:
        raise UserError(
            f"made with another environment ({'; '.join(map(str, broken))}): the curve would not go on bit for bit",
            where=str(place),
            fix="give the run what it was begun with, or continue anyway with checkpoint.exact=false",
        )
    return [str(difference) for difference in differences(before, now)]


def _hash(files: list[Path]) -> str:
    state = xxhash.xxh3_64()
    for file in files:
        if file.exists():
            state.update(file.name.encode() + b"\0" + file.read_bytes())
    return state.hexdigest()
