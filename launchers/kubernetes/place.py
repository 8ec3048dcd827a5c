"""Where a run is, as recorded in its record directory: kubernetes.json beside the copied records.

Cluster and namespace are fixed at submission: the run is found even if kubectl's context changes afterwards.
`Cursor` is the position up to which a launcher pod's log has been copied (`log_replicator`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ortflow.workflow.run.rundir import RunDir, write_atomically
from ortflow.workflow.system.files import read_whole

if TYPE_CHECKING:
    from pydantic import TypeAdapter

FILE = "kubernetes.json"


@dataclass(frozen=True)
class Cursor:
    """The position up to which a pod's log was copied."""

    pod: str
    """Its name, for messages."""
    time: str = ""
    """Time of the last copied line, as the kubelet writes it."""
    lines: int = 0
    """Number of copied lines with that time."""
    done: bool = False
    """The pod has ended, and everything was copied."""
    begun: bool = True
    """It has reported the run's attempts: the records there are from this pod."""


@dataclass(frozen=True)
class Place:
    """A run in a cluster."""

    namespace: str
    name: str
    """The run's name, in the label."""
    job: str | None = None
    """Its current or last MPIJob."""
    context: str | None = None
    """Context of the kubeconfig; None inside the cluster."""
    attempt: int = 0
    """The attempt whose lines are in the log now."""
    cursors: Mapping[str, Cursor] = field(default_factory=dict)
    """Cursors by the pod's uid."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """How long the copied logs were when this was written: the rest is from an interrupted copy."""
    volume: str | None = None
    """Volume of that MPIJob, as one string: one of the same name on another volume is another run."""
    apart: tuple[str, ...] = ()
    """MPIJobs of the name that are not followed: they existed when this one was cancelled."""

    @property
    def handle(self) -> str:
        """The handle of the run, valid on any machine."""
        return f"kubernetes://{self.namespace}/{self.job or self.name}"

    def at(self, job: str) -> Place:
        """The same run in another MPIJob."""
        return replace(self, job=job)


def read_place(run: RunDir) -> Place | None:
    """The place in a record directory; None if there is none."""
    try:
        data = read_whole(run.root / FILE)
        place = _adapter().validate_json(data, strict=True)
        # Written by a later version with more fields.
        return place if json.loads(data).keys() <= asdict(place).keys() else None
    except (OSError, ValueError):
        return None


@functools.cache
def _adapter() -> TypeAdapter[Place]:
    from pydantic import TypeAdapter

    return TypeAdapter(Place)


def write_place(run: RunDir, place: Place) -> None:
    """Save it."""
    values: dict[str, Any] = asdict(place)
    write_atomically(run.root / FILE, json.dumps(values, indent=1).encode())


def is_real(run: RunDir) -> bool:
    """Whether this is the run directory itself, mounted or copied from the volume, not a record directory.

    Only a launcher pod claims a run directory, and a record directory without a copied log has no attempts.
    """
    if run.owner.exists():
        return True
    place = read_place(run)
    copied = place is not None and bool(place.cursors)
    return not copied and any(record.get("event") == "start" for record in run.read_attempts())
