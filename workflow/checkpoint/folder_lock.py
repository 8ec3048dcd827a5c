"""The lock of a folder of checkpoints outside its run directory: two runs must not use it at the same time.

Rank 0 holds it while it lives, and writes into it which run it is. The record stays, so that a copy of a run directory
does not continue in the folder of the original.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from ortflow.workflow.checkpoint.checkpoint_names import LOCK
from ortflow.workflow.errors import UserError
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.system.files import open_regular, read_whole

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of a file system without locks, as on some parallel file systems."""
_FIX = "give this run another folder"


def hold(folder: Path, root: Path, run: str) -> int | None:
    """Take the lock of `folder` for the run with this id in the run directory `root`.

    Returns the descriptor that holds it until the process ends. None if an earlier attempt of the same run, on a node
    that was lost, still seems to hold it: the fence ends that one. None also if the folder cannot be written: then
    saves fail, and report why. Raises UserError if another run holds it, or if the directory is a copy of one that uses
    the folder.
    """
    path = folder / LOCK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # For writing: NFS emulates flock by locks of fcntl, of which an exclusive one needs that (flock(2)).
        descriptor = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        in_use = not _take(descriptor)
        holder = _record(path)
        other = holder.get("run_dir")
        same_run = holder.get("id") == run
        if in_use and not (same_run and other == str(root)):
            raise UserError(
                f"{folder} is in use by the run in {other or 'another directory'}", where="checkpoint.directory",
                fix=f"{_FIX}, or wait until that run has ended",
            )  # fmt: skip
        if same_run and isinstance(other, str) and _is_copied(Path(other), root, run):
            raise UserError(
                f"{folder} is the folder of the run in {other}, of which {root} is a copy",
                where="checkpoint.directory", fix=f"{_FIX}, with a copy of the checkpoints",
            )  # fmt: skip
    except BaseException:
        os.close(descriptor)
        raise
    if in_use:
        os.close(descriptor)
        return None
    record = json.dumps({"run_dir": str(root), "id": run, "pid": os.getpid()}).encode()
    with suppress(OSError):  # a full disk
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, record, 0)
    return descriptor


def _take(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def _record(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(read_whole(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _is_copied(other: Path, root: Path, run: str) -> bool:
    """Whether a run is at both places: a directory that was renamed is only at the new one."""
    plan = _record(RunDir(other).plan).get("run")
    return isinstance(plan, dict) and plan.get("id") == run and not os.path.samefile(other, root)
