"""Retention of checkpoints: the newest K, every M-th step permanently, and the best one.

Called by rank 0 after a commit and by the command line. Folders that are not committed or have wrong sizes are not
counted and not deleted, because they may be the only copy. Neither are folders that contain other files than a
checkpoint's.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ortflow.workflow.checkpoint.manifest import Damaged, Manifest
from ortflow.workflow.checkpoint.store import CheckpointStore
from ortflow.workflow.checkpoint.verify import check_sizes, read_any


def expired(steps: Sequence[int], newest: int, every: int | None = None) -> list[int]:
    """The steps that are neither among the `newest` nor a multiple of `every`, ascending."""
    ordered = sorted(steps)
    return [step for step in ordered[: max(0, len(ordered) - newest)] if every is None or step % every]


def prune(
    store: CheckpointStore,
    newest: int,
    every: int | None = None,
    distrusted: Collection[int] = (),
    best: Collection[int] = (),
) -> list[int]:
    """Delete the expired checkpoints that contain no other files, oldest first. Returns their steps.

    `distrusted` are steps that were found corrupt when read: they do not count among the newest. `best` are
    steps that are kept in any case. Raises OSError.
    """
    sound = [step for step in store.steps() if step not in distrusted and _sound(store, step)]
    gone = [step for step in expired(sound, newest, every) if step not in best and store.is_own(step)]
    for step in gone:
        store.remove(step)
    return gone


def best_steps(store: CheckpointStore) -> list[int]:
    """The step of the best checkpoint, as the newest readable one has it; empty if the run has none."""
    for step in reversed(store.steps()):
        try:
            manifest = read_any(store, step)
        except Damaged:
            continue
        best = manifest.progress.get("best_checkpoint_step") if isinstance(manifest, Manifest) else None
        return [best] if isinstance(best, int) else []
    return []


def _sound(store: CheckpointStore, step: int) -> bool:
    try:
        return not check_sizes(store, read_any(store, step))
    except Damaged:
        return False
