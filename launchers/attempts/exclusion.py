"""Nodes that take part in no further attempt of a run. Pure, except for the reading of the ranks' records.

A node is excluded at once if the preflight names it, and if the ends of two attempts are blamed on it: it was lost, a
rank on it was killed by a signal, or its ranks keep all others waiting. An exception of the program blames no node.
Recorded with the end of an attempt; a run that is resumed after it gave up begins anew.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ortflow.launchers.attempts.cause import Cause
from ortflow.launchers.attempts.tail import newest
from ortflow.launchers.records import Outcome, Records
from ortflow.workflow.run.rundir import RunDir

RETAIN = "retain"
"""The event of a record with excluded nodes that workers stay on."""
BLAMES = 2
"""Ends of attempts after which the node that they are blamed on is excluded."""
_CRASH = re.compile(r"\brank \d+ was killed by SIG(?:KILL|SEGV|BUS|ABRT|ILL|FPE)(?! \(out of memory\))")


def excluded(records: Records) -> dict[str, str]:
    """The excluded nodes, each with its reason."""
    return {
        str(node): str(reason)
        for record in _of_this_budget(records)
        for node, reason in (record.get("excludes") or {}).items()
    }


def retained(records: Records) -> dict[str, str]:
    """Excluded nodes that workers stay on because the scheduler refuses to replace them, each with its reason."""
    return {
        str(node): str(record.get("why"))
        for record in _of_this_budget(records)
        if record.get("event") == RETAIN
        for node in record.get("nodes") or ()
    }


def exclusion_reasons(records: Records) -> dict[str, str]:
    """The excluded nodes, each with its reason and, if a worker stays on it, the reason of that."""
    stays = {node: f"; its worker stays there: {why}" for node, why in retained(records).items()}
    return {node: reason + stays.get(node, "") for node, reason in excluded(records).items()}


def is_among(node: str, names: Iterable[str]) -> bool:
    """Whether a scheduler's name of a node is among the ranks' names of nodes, which may have a domain."""
    return node.partition(".")[0] in {name.partition(".")[0] for name in names}


def places_of(run: RunDir, attempt: int, world_size: int) -> dict[int, str]:
    """The node of each rank that has started in an attempt; known while its first steps are its newest events."""
    started = newest(run, attempt, range(world_size), "attempt_start")
    return {rank: str(record.get("node") or record.get("host")) for rank, record in started.items()}


def slow_in_preflight(run: RunDir, attempt: int) -> dict[str, str]:
    """The nodes that the preflight of an attempt found too slow, each with its reason."""
    bad = newest(run, attempt, [0], "preflight", limit=1 << 20).get(0, {}).get("bad")
    return {str(node): f"preflight: it {reason}" for node, reason in bad.items()} if isinstance(bad, dict) else {}


def blamed(cause: Cause, places: Mapping[int, str]) -> tuple[str, ...]:
    """The nodes that an attempt's end is blamed on: none if all ranks were on one node."""
    if len(set(places.values())) == 1 or cause.outcome not in (Outcome.FAILURE, Outcome.LOST):
        return ()
    if cause.nodes:
        return cause.nodes
    if cause.waited_for:
        nodes = {places[rank] for rank in cause.waited_for if rank in places}
        return tuple(nodes) if len(nodes) == 1 else ()
    if cause.rank is not None and cause.rank in places and _CRASH.search(cause.sentence):
        return (places[cause.rank],)
    return ()


def blamed_too_often(nodes: Iterable[str], sentence: str, records: Records) -> dict[str, str]:
    """Those of the nodes that an end is blamed on which are excluded because of it, each with its reason."""
    reasons = {}
    for node in nodes:
        before = [str(r.get("cause")) for r in _of_this_budget(records) if node in (r.get("blamed") or ())]
        if len(before) + 1 >= BLAMES and node not in excluded(records):
            reasons[node] = "blamed for the ends of two attempts: " + "; ".join([*before, sentence][-BLAMES:])
    return reasons


def _of_this_budget(records: Records) -> Sequence[dict[str, Any]]:
    resets = [place for place, record in enumerate(records) if record.get("new_budget")]
    return records[resets[-1] if resets else 0 :]
