"""The program of every rank, on every backend: `python -m ortflow.workflow.rank RUN_DIR`.

Started by mpirun, srun or alone. The order at the start matters: first the stop signals, because a preemption does not
wait for imports; then the log, so that later errors are recorded; the heavy imports last.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import gc
import os
import signal
import sys
from pathlib import Path

from ortflow.workflow.errors import EXIT_FAILURE, EXIT_USER
from ortflow.workflow.ranks import Place
from ortflow.workflow.run.fence import of_this_rank
from ortflow.workflow.run.location import Location
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.run.signals import StopFlag
from ortflow.workflow.system.disk_space import Notice
from ortflow.workflow.system.files import open_regular
from ortflow.workflow.system.streams import guard_log

PR_SET_PDEATHSIG = 1
UNSEEN = "it must be on storage that every node mounts; set run_dir, or exclude the node"
GONE = "restore the file, or submit the run from the beginning with --fresh"


def main(arguments: list[str]) -> int:
    """Run this rank to its end; returns the exit code."""
    try:
        return run_rank(arguments)
    except OSError as error:
        # The log or a lock cannot be opened, so there is no record to write to.
        print(f"error: {error.filename or arguments[0]}: {error.strerror}", flush=True)
        return EXIT_FAILURE


def run_rank(arguments: list[str]) -> int:
    """Run this rank. Raises OSError if log, locks and records of the run directory cannot be opened."""
    run_dir = RunDir(Path(arguments[0]).resolve())
    stop = StopFlag(run_dir.stop_request)
    stop.install()
    place = Place.from_environment()
    attempt = int(os.environ.get("ORTFLOW_ATTEMPT", "0"))
    if not run_dir.run_file.exists():
        print(f"error: {place.host} {lacking(run_dir)}", flush=True)
        return EXIT_USER
    if os.environ.get("ORTFLOW_DIE_WITH_PARENT") and place.manager != "none":
        die_with_parent()
    if os.environ.get("ORTFLOW_LAUNCHER"):  # without a log, the process that started this rank collects its output
        redirect_output(run_dir.log(attempt, place.rank))
    guard_log()
    location = Location(run_dir.root)
    fence = of_this_rank(run_dir, location)
    fence.hold()
    fence.watch()
    stop.stay_in(location)
    if place.rank == 0:
        Notice(run_dir.heartbeat).clear()
        stop.beat(run_dir.heartbeat)
    lock = hold_ranks_lock(run_dir.ranks_lock)
    # Core dumps and relative paths belong here. Launchers start ranks elsewhere, because of `-m`: see `start_folder`.
    os.chdir(run_dir.root)

    # Nothing that an import makes is garbage. To look through it all costs a tenth of the imports' time (CPython 3.11);
    # `execute` ends the pause.
    gc.disable()
    from ortflow.workflow.executor import execute

    code = execute(run_dir, place, attempt, stop, fence, location)
    sys.stdout.flush()
    sys.stderr.flush()
    os.close(lock)
    return code


def lacking(run_dir: RunDir) -> str:
    """What a rank without a run file is missing: the whole directory, or only that file."""
    if run_dir.attempts.exists():
        return f"finds no {run_dir.run_file}, although other files of the run exist: {GONE}"
    return f"does not see the run directory {run_dir.root}: {UNSEEN}"


def die_with_parent() -> None:
    """Let the kernel kill this rank when its process manager dies, so that no rank is left behind (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def redirect_output(path: Path) -> None:
    """Redirect standard output and error, including those of libraries, to this rank's log.

    The log also stays open behind the connection to Hydra. The kernel closes a dead process's files from the last one
    on, so the launcher sees the log closed before Hydra sees the connection closed and kills the other ranks.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    # A file of its own: children share the one of standard output, and may live longer.
    log_descriptor = open_regular(path, os.O_WRONLY | os.O_APPEND)
    with contextlib.suppress(OSError, ValueError):  # no descriptor is left behind it
        fcntl.fcntl(log_descriptor, fcntl.F_DUPFD_CLOEXEC, int(os.environ.get("PMI_FD", log_descriptor)) + 1)
        os.close(log_descriptor)


def hold_ranks_lock(path: Path) -> int:
    """Hold a shared lock while this rank lives: a launcher waits for all of them before it starts others."""
    descriptor = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    except OSError as error:
        # Some parallel file systems are mounted without locks; there only the fence protects the run.
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
    return descriptor


if __name__ == "__main__":
    # Threads of libraries must not delay or change the exit code.
    os._exit(main(sys.argv[1:]))
