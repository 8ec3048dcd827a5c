"""The fence: ensures that only one generation of ranks writes to a run directory.

A scheduler that has lost contact with a node restarts the run elsewhere while the old ranks may still run. Therefore a
supervisor first writes a new token into the directory (`claim`) and passes it to its ranks. Each rank polls the file in
a thread, and exits immediately, wherever it hangs and without another write, if it finds another token. Locks do not
suffice: on network file systems, a node that is cut off may hold one forever.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

from ortflow.workflow.run.location import Location
from ortflow.workflow.run.rundir import RunDir, write_atomically
from ortflow.workflow.system.files import read_whole

VARIABLE = "ORTFLOW_OWNER"
"""Environment variable with the token of the ranks' generation."""
PERIOD = 0.5
"""Seconds between two polls."""
DELAY = 4 * PERIOD
"""Seconds after a claim within which all ranks of the earlier generation have polled."""
EXIT_FENCED = 76
"""No launcher acts on this exit code: a fenced generation is obsolete."""


class Fence:
    """The token of a generation, and whether the directory still has it."""

    def __init__(self, path: Path, token: str, location: Location | None = None) -> None:
        self._path, self.token, self._location = path, token, location

    @property
    def lost(self) -> bool:
        """Whether the directory belongs to another generation; False if the file cannot be read."""
        if self._owner() in (None, self.token):
            return False
        # Another directory may be at the path of a renamed one: its owner says nothing about this one's.
        return self._location is None or self._location.intact()

    def _owner(self) -> str | None:
        try:
            owner = json.loads(read_whole(self._path))
        except (OSError, ValueError, RecursionError):
            return None
        return owner.get("token") if isinstance(owner, dict) else None

    def hold(self) -> None:
        """Exit immediately if the directory belongs to another generation; called before anything becomes visible."""
        if self.lost:
            leave()

    def watch(self, react: Callable[[], None] | None = None) -> None:
        """Poll every PERIOD in a thread; call `react` on a loss, by default `leave`."""
        thread = threading.Thread(target=self._watch_owner, args=(react or leave,), name="fence", daemon=True)
        thread.start()

    def _watch_owner(self, react: Callable[[], None]) -> None:
        pause = threading.Event()
        while not pause.wait(PERIOD):
            if self.lost:
                react()
                return


class Owner(Fence):
    """The fence of a supervisor, which starts one generation after another; its own generations are not a loss."""

    def __init__(self, run: RunDir) -> None:
        super().__init__(run.owner, "")
        self._run = run
        self._ours: set[str] = set()

    @property
    def lost(self) -> bool:
        """Whether the directory belongs to a generation of another supervisor."""
        owner = self._owner()
        return bool(self._ours) and owner is not None and owner not in self._ours

    def renew(self, **about: str | int) -> str:
        """Start a new generation, which makes all earlier ones exit; returns its token."""
        token = os.urandom(16).hex()
        self._ours.add(token)
        write_atomically(self._run.owner, json.dumps({"token": token, **about}).encode())
        return token


class Open(Fence):
    """The fence of a run that can only have one generation; does nothing."""

    def __init__(self) -> None:
        super().__init__(Path(os.devnull), "")

    @property
    def lost(self) -> bool:
        """Always False."""
        return False

    def watch(self, react: Callable[[], None] | None = None) -> None:
        """Does nothing."""


def claim(run: RunDir, **about: str | int) -> Fence:
    """Take over the directory; `about` describes the owner for people."""
    return Fence(run.owner, Owner(run).renew(**about))


def of_this_rank(run: RunDir, location: Location | None = None) -> Fence:
    """The fence that this rank was started with."""
    token = os.environ.get(VARIABLE)
    return Fence(run.owner, token, location) if token else Open()


def leave() -> None:
    """End this process without another write to the run directory's records."""
    print("a newer attempt owns the run directory: this attempt exits", flush=True)
    # sys.exit would end the polling thread alone.
    os._exit(EXIT_FENCED)
