"""Where a run is, as its record directory knows it: kubernetes.json beside the copied records.

Cluster and namespace are pinned when the run is submitted: who changes kubectl's context afterwards still finds it.
`Cursor` says how far a launcher pod's log has been copied (`mirror`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ortflow.workflow.files import read_whole
from ortflow.workflow.rundir import RunDir, write_atomically

if TYPE_CHECKING:
    from pydantic import TypeAdapter

FILE = "kubernetes.json"


@dataclass(frozen=True)
class Cursor:
    """How far the log of a pod was copied."""

    pod: str
    """Its name, for people."""
    time: str = ""
    """Of the last line that was taken, as the kubelet writes it."""
    lines: int = 0
    """Lines of that very time."""
    done: bool = False
    """The pod had ended, and everything was taken."""
    begun: bool = True
    """It has told of the run's attempts: what is on record there is as it left it."""


@dataclass(frozen=True)
class Place:
    """A run in a cluster."""

    namespace: str
    name: str
    """The run's, in the label."""
    job: str | None = None
    """The MPIJob that it is in, or was last."""
    context: str | None = None
    """Of the kubeconfig; None inside the cluster."""
    attempt: int = 0
    """Whose lines the log tells now."""
    cursors: Mapping[str, Cursor] = field(default_factory=dict)
    """By the pod's uid."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """How long the copied logs were when this was written: what is beyond comes from a copying that did not end."""
    volume: str | None = None
    """Of that MPIJob, in one word: one of the same name on another volume is another run."""
    apart: tuple[str, ...] = ()
    """MPIJobs of the name that are not followed: they were there when this one was cancelled."""

    @property
    def handle(self) -> str:
        """How the run is named from everywhere."""
        return f"kubernetes://{self.namespace}/{self.job or self.name}"

    def at(self, job: str) -> Place:
        """The same run in another MPIJob."""
        return replace(self, job=job)


def read_place(run: RunDir) -> Place | None:
    """The place that a record directory knows; None if it knows none."""
    try:
        data = read_whole(run.root / FILE)
        place = _adapter().validate_json(data, strict=True)
        # Of a later version, whose other fields may mean something.
        return place if json.loads(data).keys() <= asdict(place).keys() else None
    except (OSError, ValueError):
        return None


@functools.cache
def _adapter() -> TypeAdapter[Place]:
    from pydantic import TypeAdapter

    return TypeAdapter(Place)


def write_place(run: RunDir, place: Place) -> None:
    """Keep it."""
    values: dict[str, Any] = asdict(place)
    write_atomically(run.root / FILE, json.dumps(values, indent=1).encode())


def is_real(run: RunDir) -> bool:
    """Whether the directory is the run's own, seen through a mount or copied from the volume: no record of ours.

    Only a launcher's pod claims it, and where no log was copied from, no attempt can stand in it.
    """
    if run.owner.exists():
        return True
    place = read_place(run)
    copied = place is not None and bool(place.cursors)
    return not copied and any(record.get("event") == "start" for record in run.read_attempts())
