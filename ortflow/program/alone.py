"""Checkpoints of a program that runs without ortflow: folders below ./checkpoints, complete or not there.

Several ranks need torch.distributed here: without it nothing tells a rank when the others have written.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from ortflow.program.errors import CommitFailed, ProgramError
from ortflow.program.world import World

FOLDER = "checkpoints"
COMMITTED = "COMMITTED"
PREFIX = "step-"
OLD = ".old"
"""End of the name of a checkpoint that is being replaced."""


def newest(folder: Path) -> Path | None:
    """Return the newest complete checkpoint of the folder."""
    for marker in folder.glob(f".{PREFIX}*{OLD}/{COMMITTED}"):
        _take_back(marker.parent)
    markers = folder.glob(f"{PREFIX}*/{COMMITTED}")
    complete = [marker.parent for marker in markers if marker.parent.name.removeprefix(PREFIX).isdecimal()]
    return max(complete, key=step_of, default=None)


def _take_back(replaced: Path) -> None:
    """Give a checkpoint its name again if its commit was killed before the one that replaces it had taken the name."""
    final = replaced.with_name(replaced.name.removeprefix(".").removesuffix(OLD))
    if final.name.removeprefix(PREFIX).isdecimal() and not os.path.lexists(final):
        with contextlib.suppress(OSError):  # another rank was faster
            replaced.rename(final)


def step_of(path: Path) -> int:
    """Return the step of a checkpoint's folder."""
    return int(path.name.removeprefix(PREFIX))


@contextlib.contextmanager
def commit(folder: Path, step: int, world: World) -> Iterator[Path]:
    """Yield a temporary folder, which becomes the checkpoint when every rank has left the block without an error.

    Raises CommitFailed on every rank if one failed.
    """
    gather = _gather(world)
    temporary, final = folder / f".{PREFIX}{step:08d}", folder / f"{PREFIX}{step:08d}"
    if trouble := next(filter(None, gather(_begin(temporary, final) if world.rank == 0 else "")), ""):
        raise CommitFailed(f"the checkpoint of step {step} was not made: {trouble}")
    error = ""
    try:
        yield temporary
    except BaseException as raised:
        error = f"rank {world.rank}: {type(raised).__name__}: {raised}"
        raise
    finally:
        errors = [text for text in gather(error) if text]
        if errors and world.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
    if not errors:
        errors = [text for text in gather(_publish(temporary, final) if world.rank == 0 else "") if text]
    if errors:
        raise CommitFailed(f"the checkpoint of step {step} was not made: {errors[0]}")


def _begin(temporary: Path, final: Path) -> str:
    """Make the temporary folder empty; returns why that fails, or why the checkpoint could not take its name."""
    if os.path.lexists(final) and not (final / COMMITTED).is_file():
        return f"{final} is not a checkpoint: rename it"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    return ""


def _publish(temporary: Path, final: Path) -> str:
    """Make the temporary folder the checkpoint; returns why that fails."""
    replaced = temporary.with_name(f"{temporary.name}{OLD}")
    try:
        for path in sorted(temporary.rglob("*"), reverse=True):
            _sync(path)
        (temporary / COMMITTED).touch()
        _sync(temporary)
        # Until the new one has the name, there is always a complete one: `newest` knows both names.
        while True:
            if final.exists():
                _remove(replaced)
                final.rename(replaced)
            try:
                temporary.rename(final)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            else:
                break  # else a reader took the old one back
        # A new name is durable when the folder that holds it is (fsync(2)).
        _sync(final.parent)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        return f"{error.filename}: {error.strerror}"
    with contextlib.suppress(OSError):
        _remove(replaced)
    return ""


def _remove(replaced: Path) -> None:
    """Remove a checkpoint that was replaced; without its marker a part of it is never taken for a checkpoint."""
    (replaced / COMMITTED).unlink(missing_ok=True)
    shutil.rmtree(replaced, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _gather(world: World) -> Callable[[str], list[str]]:
    """Return a function that waits for all ranks and returns the text of each."""
    if world.size == 1:
        return lambda text: [text]
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        raise ProgramError(
            f"without ortflow, a commit of {world.size} ranks needs torch.distributed: call init_process_group first"
        )

    def gather(text: str) -> list[str]:
        texts: list[str] = [""] * world.size
        distributed.all_gather_object(texts, text)
        return texts

    return gather
