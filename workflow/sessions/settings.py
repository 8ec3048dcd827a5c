"""How sessions are opened on a runtime that needs care. Plain data: everything may import this module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Settings:
    """What differs from a session as ONNX Runtime opens it."""

    disabled: tuple[str, ...] = ()
    """Rewrites of its optimiser that are left out, by its own names, sorted."""
    optimised: bool = True
    """False: nothing is rewritten at all."""

    def __str__(self) -> str:
        return ", ".join((*self.disabled, *(() if self.optimised else ("no optimisation",)))) or "none"


DEFAULTS = Settings()
"""A runtime that needs no care."""


@dataclass(frozen=True)
class Outcome:
    """What the check has found: how sessions are to be opened here, and what is wrong where they are not."""

    settings: Settings
    faults: Mapping[str, str] = field(default_factory=dict)
    """What was computed wrongly without the settings, and how."""


def merged(settings: Iterable[Settings]) -> Settings:
    """What serves all machines of a run."""
    settings = list(settings)
    names = {name for each in settings for name in each.disabled}
    return Settings(tuple(sorted(names)), all(each.optimised for each in settings))
