"""Files of MPI daemons in the temporary folder, which a daemon removes only at a normal exit.

Open MPI has a session folder of some hundred kilobytes for each mpirun and each daemon. The folder of a killed rank's
daemon is removed by the next rank on the machine, which finds its name in the ranks' records (`segments`), or by a
launcher that killed mpirun. The proxies of MPICH's mpirun have a file with the machine's topology, whose name no rank
knows. Ranks remove all of them if no proxy but their own is alive, and their own once every rank has read it.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_SESSION = re.compile(r"/(?:.*/)?ompi\.[\w.\-]+(?:/pid\.\d+)?")
"""The session folder's path in Open MPI 5, and in Open MPI 4, which puts those of a user into one folder."""
_PROXY, _TOPOLOGY = "hydra_pmi_proxy", "hydra_hwloc_xmlfile_"


def own() -> str:
    """The folder of the daemon that started this process; empty if there is none."""
    path = os.environ.get("PMIX_SERVER_TMPDIR", "")
    return path if _is_session(path) else ""


def remove(path: str) -> bool:
    """Remove the folder of a daemon that was killed; False if some of it must stay for now.

    It stays while a process maps a file of it. A link, another user's folder or a folder that is not Open MPI's is left
    alone.
    """
    try:
        status = os.lstat(path)
    except OSError:
        return True
    if not _is_session(path) or not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        return True
    if _is_mapped(path):
        return False
    shutil.rmtree(path, ignore_errors=True)
    parent = os.path.dirname(path)
    if _is_session(parent):
        with suppress(OSError):
            os.rmdir(parent)  # if it was the user's last one
    return not os.path.lexists(path)


def remove_of(pid: int) -> None:
    """Remove the folder of an mpirun of Open MPI's that was killed on this machine, if it has left one.

    Must not be called for another program: where containers share the temporary folder, process ids repeat.
    """
    folder = Path(tempfile.gettempdir())
    for path in (folder / f"ompi.{pid}", *folder.glob(f"ompi.*/pid.{pid}")):
        remove(str(path))


def remove_topologies(folder: Path = Path("/tmp")) -> None:
    """Remove the files of this user's proxies, unless one is alive that did not start this process.

    Every rank of this process's own proxy must have started its MPI. MPICH writes to /tmp, whatever TMPDIR is.
    """
    if not Path("/proc/self").exists():
        return
    # List the files first: a proxy that starts after the processes are listed has no file in this list.
    files = [path for path in folder.glob(f"{_TOPOLOGY}??????") if _is_ours(path)]
    if files and set(proxies()) <= {os.getppid()}:
        for path in files:
            with suppress(OSError):
                path.unlink()


def _is_ours(path: Path) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid()


def proxies() -> Iterator[int]:
    """Process ids of MPICH's running proxies, of all users."""
    for process in _processes():
        with suppress(OSError):
            if (process / "comm").read_text().strip() == _PROXY:
                yield int(process.name)


def _is_session(path: str) -> bool:
    return _SESSION.fullmatch(path) is not None


def _is_mapped(path: str) -> bool:
    return any(f" {path}/" in text for text in _maps())


def _maps() -> Iterator[str]:
    for process in _processes():
        with suppress(OSError):
            yield (process / "maps").read_text(errors="replace")


def _processes() -> list[Path]:
    return [path for path in Path("/proc").glob("[0-9]*") if path.name.isdigit()]
