"""Whose the run directory is, where two generations of ranks can be alive at once.

A scheduler that has lost sight of a node starts the run elsewhere while the old ranks may run on. Whoever starts ranks
therefore first writes a fresh token into the directory (`claim`) and hands it to them; each rank looks at it from a
thread of its own, and one that finds another there leaves on the spot, wherever it hangs, without another write.
Locks do not serve for this: on network file systems a node that is cut off may hold one forever.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

from ortflow.workflow.files import read_whole
from ortflow.workflow.rundir import RunDir, write_atomically

VARIABLE = "ORTFLOW_OWNER"
"""Environment variable with the token of the ranks' generation."""
PERIOD = 0.5
"""Seconds between two looks."""
DELAY = 4 * PERIOD
"""Seconds after a claim in which ranks of the generation before have surely looked."""
EXIT_FENCED = 76
"""Told to nobody that acts on it: a fenced generation has no say any more."""


class Fence:
    """The token of a generation, and whether the directory still carries it."""

    def __init__(self, path: Path, token: str) -> None:
        self._path, self.token = path, token

    @property
    def lost(self) -> bool:
        """Whether the directory belongs to another generation; a file that cannot be read says nothing."""
        return self._owner() not in (None, self.token)

    def _owner(self) -> str | None:
        try:
            owner = json.loads(read_whole(self._path))
        except (OSError, ValueError):
            return None
        return owner.get("token") if isinstance(owner, dict) else None

    def hold(self) -> None:
        """Leave on the spot if the directory is another's: the last look before something becomes visible."""
        if self.lost:
            leave()

    def watch(self, react: Callable[[], None] | None = None) -> None:
        """Look every PERIOD from a thread of its own; `react` to a loss, by default by leaving on the spot."""
        thread = threading.Thread(target=self._look_on, args=(react or leave,), name="fence", daemon=True)
        thread.start()

    def _look_on(self, react: Callable[[], None]) -> None:
        pause = threading.Event()
        while not pause.wait(PERIOD):
            if self.lost:
                react()
                return


class Owner(Fence):
    """Who starts one generation after another, each behind a fence of its own: none of ours is a loss to us."""

    def __init__(self, run: RunDir) -> None:
        super().__init__(run.owner, "")
        self._run = run
        self._ours: set[str] = set()

    @property
    def lost(self) -> bool:
        """Whether the directory belongs to somebody else's generation."""
        owner = self._owner()
        return bool(self._ours) and owner is not None and owner not in self._ours

    def renew(self, **about: str | int) -> str:
        """Make the directory that of a new generation, and all earlier ones leave; its token."""
        token = os.urandom(16).hex()
        self._ours.add(token)
        write_atomically(self._run.owner, json.dumps({"token": token, **about}).encode())
        return token


class Open(Fence):
    """The fence of a run that only one generation can have: nothing to look at."""

    def __init__(self) -> None:
        super().__init__(Path(os.devnull), "")

    @property
    def lost(self) -> bool:
        """Never."""
        return False

    def watch(self, react: Callable[[], None] | None = None) -> None:
        """Nothing to watch."""


def claim(run: RunDir, **about: str | int) -> Fence:
    """Make the directory ours; `about` tells people who that is."""
    return Fence(run.owner, Owner(run).renew(**about))


def of_this_rank(run: RunDir) -> Fence:
    """The fence that this rank was started behind."""
    token = os.environ.get(VARIABLE)
    return Fence(run.owner, token) if token else Open()


def leave() -> None:
    """End this process without another write to the run directory's records."""
    print("a newer attempt owns the run directory: this attempt exits", flush=True)
    os._exit(EXIT_FENCED)
