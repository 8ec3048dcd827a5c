"""What the daemons of an MPI keep in the temporary folder, and remove only when they leave in order.

Open MPI has a session folder of some hundred kilobytes for each mpirun and each daemon. The next rank on the machine
removes that of a killed one, as the records of ranks name it (`segments`); so does a launcher that killed mpirun. The
proxies of MPICH's mpirun have a file with the topology of the machine, whose name no rank knows: ranks remove all of
them when no proxy but their own is alive, and theirs once every rank has read it.
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
"""Its path: of Open MPI 5, and of 4, which puts those of a user into one folder."""
_PROXY, _TOPOLOGY = "hydra_pmi_proxy", "hydra_hwloc_xmlfile_"


def own() -> str:
    """The folder of the daemon that started this process; empty if there is none."""
    path = os.environ.get("PMIX_SERVER_TMPDIR", "")
    return path if _is_session(path) else ""


def remove(path: str) -> bool:
    """Remove the folder of a daemon that was killed; False if some of it has to stay for now.

    It stays while a process maps a file of it. A link, or what is another user's or not Open MPI's, is nobody's session
    folder, and is left.
    """
    try:
        found = os.lstat(path)
    except OSError:
        return True
    if not _is_session(path) or not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
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
    # The files first: the proxy of one that is made after the look at the processes is not among them.
    files = [path for path in folder.glob(f"{_TOPOLOGY}??????") if _is_ours(path)]
    if files and set(proxies()) <= {os.getppid()}:
        for path in files:
            with suppress(OSError):
                path.unlink()


def _is_ours(path: Path) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid()


def proxies() -> Iterator[int]:
    """Process ids of MPICH's living proxies, of all users."""
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
