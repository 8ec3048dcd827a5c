"""Findings of `ortflow doctor`: one line each, with the fix for a fault. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ortflow.workflow.errors import UserError


class Level(str, Enum):
    """Severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    """Runs work, but may be slow or behave unexpectedly."""
    FAULT = "fault"
    """A run would fail, or would never start."""
    UNTESTED = "untested"
    """Not checked."""


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    level: Level
    about: str
    """Subject of the check, in one or two words."""
    what: str
    fix: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Measured numbers, for programs."""

    def __str__(self) -> str:
        return f"{self.level.value:<9} {self.about}: {self.what}" + (f"; {self.fix}" if self.fix else "")

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        fields = {"level": self.level.value, "about": self.about, "what": self.what, "fix": self.fix or None}
        return {**fields, **({"data": dict(self.data)} if self.data else {})}


def ok(about: str, what: str, **data: Any) -> Finding:
    """Works."""
    return Finding(Level.OK, about, what, data=data)


def warning(about: str, what: str, fix: str = "", **data: Any) -> Finding:
    """Works, but."""
    return Finding(Level.WARNING, about, what, fix, data)


def fault(about: str, what: str, fix: str = "", **data: Any) -> Finding:
    """A fault."""
    return Finding(Level.FAULT, about, what, fix, data)


def untested(about: str, what: str, fix: str = "") -> Finding:
    """Not checked, and why."""
    return Finding(Level.UNTESTED, about, what, fix)


def from_error(about: str, error: UserError) -> Finding:
    """A UserError as a fault."""
    place = f"{error.where}: " if error.where else ""
    return Finding(Level.FAULT, about, place + error.what, error.fix or "")


def summary(findings: Sequence[Finding]) -> str:
    """The last line: how many of each kind that is not ok."""
    counts = {level: sum(finding.level is level for finding in findings) for level in Level}
    parts = [
        f"{counts[level]} {level.value}{'s' if counts[level] > 1 and level is not Level.UNTESTED else ''}"
        for level in (Level.FAULT, Level.WARNING, Level.UNTESTED)
        if counts[level]
    ]
    if not counts[Level.FAULT]:
        parts.insert(0, "no fault")
    return ", ".join(parts)


def has_fault(findings: Iterable[Finding]) -> bool:
    """Whether there is a fault."""
    return any(finding.level is Level.FAULT for finding in findings)
