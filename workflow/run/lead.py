"""Ranks sleep until rank 0 of their node has configured the run. Called before MPI starts.

In MPI_Init the ranks of a node meet in shared memory, and those that are there poll it (MPICH 5.0): while rank 0 builds
the graphs, each of the others would use a core, which rank 0 may need. Rank 0 listens on a socket meanwhile; the others
connect to it and read until it closes. An abstract socket is not a file and ends with its process, so nothing stays
behind. Ranks that cannot connect (another node or container, not Linux, rank 0 starts later) wait in MPI_Init.
"""

from __future__ import annotations

import hashlib
import os
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path

WAITING = 4096
"""Ranks that may wait, at most; further ones wait in MPI_Init."""


class Lead:
    """Rank 0, from its start until it is ready for MPI."""

    def __init__(self, run_dir: Path, attempt: int) -> None:
        """Listen, as far as the system permits it."""
        self._socket: socket.socket | None = None
        with suppress(OSError):
            self._socket = _socket()
            self._socket.bind(_address(run_dir, attempt))
            # Linux allows at most net.core.somaxconn of them, 4096 since 5.4.
            self._socket.listen(WAITING)

    def ready(self) -> None:
        """Let the others go on; later ones do not wait."""
        if self._socket is None:
            return
        self._socket.setblocking(False)
        # Each by itself: a child process may have a copy of the listening socket, which would keep them.
        with suppress(OSError):
            while True:
                self._socket.accept()[0].close()
        self._socket.close()
        self._socket = None


def wait_for_lead(run_dir: Path, attempt: int) -> None:
    """Sleep until rank 0 is ready or has ended; return at once if it is not to be reached."""
    with suppress(OSError), _socket() as lead:
        # A connection would otherwise wait while the listener's queue is full (connect(2), EAGAIN).
        lead.setblocking(False)
        lead.connect(_address(run_dir, attempt))
        if _owner(lead) == os.geteuid():
            lead.setblocking(True)
            lead.recv(1)


def _socket() -> socket.socket:
    if sys.platform == "linux":
        return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    else:
        raise OSError("there are no abstract sockets")


def _address(run_dir: Path, attempt: int) -> str:
    """The same on all ranks of a node, whatever path leads to the run directory. Raises OSError."""
    status = run_dir.stat()
    text = f"{os.geteuid()} {status.st_dev} {status.st_ino} {attempt}"
    return f"\0ortflow-lead-{hashlib.blake2b(text.encode(), digest_size=12).hexdigest()}"


def _owner(connection: socket.socket) -> int:
    """The user that listens: any user of the machine may take a name."""
    if sys.platform == "linux":
        size = struct.calcsize("3i")
        return int(struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[1])
    else:
        raise OSError("there are no abstract sockets")
