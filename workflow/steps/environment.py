"""The environment of the ranks: recorded by step `runtime`, and compared when a run resumes."""

from __future__ import annotations

from pathlib import Path

from ortflow.workflow.checkpoint.manifest import Manifest
from ortflow.workflow.errors import UserError
from ortflow.workflow.run.recorded_environment import breaking, differences, merged
from ortflow.workflow.steps.context import Context


def environment_of_all(context: Context) -> dict[str, str]:
    """The records of all ranks, on every rank."""
    records = context.world.gather(dict(context.trainer.environment()))
    record: dict[str, str] = context.world.broadcast_object(merged(records) if records is not None else None)
    return record


def check_environment(context: Context, manifest: Manifest, place: Path) -> list[str]:
    """Describe the differences from the environment in which the checkpoint was made.

    Raises UserError if the run must continue bit-identically and cannot.
    """
    before, now = manifest.environment, context.environment
    same_ranks = manifest.world_size == context.world.world_size
    broken = breaking(before, now, same_ranks=same_ranks) if context.spec.checkpoint.exact else []
    if broken:
        raise UserError(
            f"made with another environment ({'; '.join(map(str, broken))}): the loss curve would not continue "
            f"bit-identically",
            where=str(place),
            fix="restore the original environment, or continue anyway with checkpoint.exact=false",
        )
    return [str(difference) for difference in differences(before, now)]
