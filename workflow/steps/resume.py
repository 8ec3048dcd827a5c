"""Finds the newest complete checkpoint at the start of an attempt and continues from it. Called by step `runtime`."""

from __future__ import annotations

from ortflow.workflow.checkpoint.load import load, newest_matching, window_for
from ortflow.workflow.checkpoint.manifest import Damaged, Manifest
from ortflow.workflow.checkpoint.store import DirectoryStore
from ortflow.workflow.errors import UserError
from ortflow.workflow.run.progress import Progress
from ortflow.workflow.steps.context import Context
from ortflow.workflow.steps.environment import check_environment
from ortflow.workflow.trainer_protocol.capabilities import CopyingState, StoringNumbers


def resume(context: Context, store: DirectoryStore) -> tuple[int, set[int]]:
    """Fill the state from the newest complete checkpoint. Rank 0 chooses it, each rank verifies what it reads.

    Files are read straight into the state, so rank 0 verifies them first: nothing of a damaged checkpoint may remain.

    Returns
    -------
    int
        Its step; 0 if there is none.
    set of int
        The steps of the checkpoints that were rejected; on rank 0.
    """
    begun = context.clock.monotonic()
    rejected = set[int]()
    targets = {name: window_for(buffer) for name, buffer in context.trainer.state().items()}

    def reject(fault: Damaged) -> None:
        context.events.write("checkpoint_rejected", path=str(fault.path), reason=fault.reason)
        print(f"warning: checkpoint rejected: {fault}", flush=True)
        rejected.update(step for step in store.steps() if fault.path.is_relative_to(store.place(step)))

    manifest: Manifest | None = None
    if context.leads:
        store.clean()
        manifest = newest_matching(store, targets, reject, index=context.trainer.index)
    changed: list[str] = []
    if manifest is not None:
        changed = check_environment(context, manifest, store.place(manifest.step))
    step: int | None = context.world.broadcast_object(manifest.step if manifest else None)
    if step is None:
        context.events.rewind(0)
        context.monitor.begin()
        return 0, rejected
    loaded = load(store, step, targets, index=context.trainer.index)
    if isinstance(context.trainer, CopyingState):
        context.trainer.after_load()
    context.progress = Progress.from_json(dict(loaded.manifest.progress))
    try:
        if isinstance(context.trainer, StoringNumbers):
            context.trainer.restore(context.progress.trainer)
    except ValueError as error:
        raise UserError(
            f"the checkpoint {error}", where=str(store.place(step)), fix="remove it, and resume from an older one"
        ) from error
    context.events.rewind(step)
    _report(context, step, str(store.place(step)), changed, context.clock.monotonic() - begun)
    return step, rejected


def _report(context: Context, step: int, path: str, changed: list[str], seconds: float) -> None:
    """`changed` is what differs in the environment, so that the curve does not continue bit by bit; `seconds` since the
    search for a checkpoint began.
    """
    plan = context.plan
    context.events.write(
        "resume", step=step, path=path, world_size=plan.world_size, global_batch=plan.global_batch,
        micro_batch=plan.micro_batch, gradient_accumulation=plan.gradient_accumulation, seconds=round(seconds, 6),
    )  # fmt: skip
    context.monitor.begin()
    if context.leads:
        print(f"resumed from {path}", flush=True)
    if changed:
        context.monitor.warn(f"the loss curve continues, but not bit-identically: {'; '.join(changed)}")
