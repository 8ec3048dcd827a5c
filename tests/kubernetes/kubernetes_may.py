"""What each accident may leave in a run's record, at most."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class May:
    """What an accident may leave."""

    failures: int = 0
    preemptions: int = 0
    ends: str = ""
    """Causes of attempts that ended: a pattern for OUTCOME: CAUSE."""


KILLED = r"failure: (rank \d+ was|ranks [\d, ]+ were|a rank on \S+ was) killed by SIGKILL"
SAVED = r"preempted: "
LOST = r"lost: (the launcher pod was lost|the worker \S+ no longer answers)"
TAKEN_AWAY = May(preemptions=1, ends=f"{SAVED}|{LOST}")
"""A pod was told to end, or was gone without a word."""
NODE = May(preemptions=2, ends=f"{SAVED}|{LOST}")
"""The worker and the launcher pod of one node."""
HUNG = r"failure: the ranks (hung|did not start): no heartbeat"

MAY: dict[str, May] = {
    "the launcher pod deleted": TAKEN_AWAY,
    "the launcher pod killed": TAKEN_AWAY,
    "a worker pod deleted": TAKEN_AWAY,
    "a worker pod killed": TAKEN_AWAY,
    "a worker evicted": TAKEN_AWAY,
    "a node drained": NODE,
    "a node off": NODE,
    # MPI may lose a message when a connection breaks, and wait for it until the attempt counts as hung.
    "a cable out": May(failures=1, preemptions=2, ends=f"{SAVED}|{LOST}|{HUNG}"),
    "a rank killed": May(failures=1, ends=KILLED),
    # Hydra's proxies may fail an assertion when all processes are gone at once; then no process is named. Ranks that
    # start a moment later wait for those that were killed, until the attempt counts as hung.
    "all ranks killed": May(failures=1, ends=rf"{KILLED}|failure: the ranks ended with exit code (9|255)$|{HUNG}"),
    "a rank told to end": May(preemptions=1, ends=SAVED),
    "all ranks told to end": May(preemptions=1, ends=SAVED),
    "the supervisor process killed": May(ends=LOST),
    "suspended": TAKEN_AWAY,
    # Healthy nodes count as lost for up to a minute afterwards, and their pods may be taken away.
    "the API server away": NODE,
    "the operator away": May(),
    "the scheduler away": May(),
    # An attempt that begins on a full disk ends, and the next one waits for room.
    "the disk full": May(ends=r"failure: out of disk on"),
    "a clock set": May(),
    "a heavy load": May(),
    "applied a second time": May(),
    "rendered by hand": May(),
    "a quota": May(),
    "a worker deleted under a quota": TAKEN_AWAY,
    "the deadline cut": TAKEN_AWAY,
}
"""Accident -> what it may leave; what has no more than `May()` must leave no trace at all."""


def too_many(struck: Iterable[str], how: dict[str, Any]) -> list[str]:
    """What a status counts beyond what was done."""
    may = [MAY[name] for name in struck]
    most = {"failures": sum(one.failures for one in may), "preemptions": sum(one.preemptions for one in may)}
    return [
        f"{how[key]} {key}, it says, and at most {count} came of what was done"
        for key, count in most.items()
        if how[key] > count
    ]


def unexplained(struck: Iterable[str], ends: Sequence[dict[str, Any]]) -> list[str]:
    """Ends of attempts by nothing that was done; what is harmless has left one attempt, which has finished."""
    patterns = [MAY[name].ends for name in struck if MAY[name].ends]
    found = []
    for end in ends:
        reported = f"{end['outcome']}: {end.get('cause') or ''}"
        if end["outcome"] != "finished" and not any(re.match(pattern, reported) for pattern in patterns):
            found.append(reported)
    return found
