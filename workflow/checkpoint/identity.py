"""Which run a checkpoint belongs to. Pure.

Every manifest has the identity of the run that saved it, so that no run continues from the state of another one: a
folder of checkpoints may be outside the run directory, and files are copied. Only `id` decides. A run keeps it for
life, with another name, number of ranks or learning rate too; the other fields describe the run for people.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from ortflow.workflow.checkpoint.manifest import Manifest
from ortflow.workflow.checkpoint.program import ProgramManifest

_PERMANENT = ("seed", "model", "data")
"""Fields that no run may change while it continues."""


@dataclass(frozen=True)
class Identity:
    """A run, as texts."""

    id: str
    """Hash of the record of its first submission."""
    name: str
    submitted: str
    """Time of its first submission in seconds since 1970; empty if there is no record of it."""
    seed: str
    model: str
    """Hash of the model's file when the run began; empty for trainers of other models."""
    data: str
    """Hash of the training set's samples."""

    def to_json(self) -> dict[str, str]:
        """The record in plans and manifests."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, str]) -> Identity | None:
        """The identity in a record; None if there is none, as in records of earlier versions."""
        names = [field.name for field in fields(cls)]
        return cls(**{name: record[name] for name in names}) if all(name in record for name in names) else None


def difference(manifest: Manifest | ProgramManifest, run: Identity) -> str | None:
    """Why a checkpoint is not one of this run; None if it is.

    A checkpoint of an earlier version has no identity. It is another run's if it is older than this run.
    """
    other = Identity.from_json(manifest.run)
    if other is None:
        if run.submitted and manifest.time < float(run.submitted):
            return f"was saved on {_date(manifest.time)}, before this run was submitted"
        return None
    if other.id == run.id:
        return None
    differing = [key for key in _PERMANENT if getattr(other, key) != getattr(run, key)]
    values = {"seed": f"seed {other.seed} there and {run.seed} here", "model": "another model", "data": "other data"}
    details = "".join(f"; {values[key]}" for key in differing)
    since = f", submitted on {_date(float(other.submitted))}" if other.submitted else ""
    return f"is of another run ({other.name}{since}{details})"


def _date(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
