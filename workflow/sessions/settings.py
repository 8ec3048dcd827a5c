"""Session options that work around errors of the installed runtime. Plain data: every module may import this one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Settings:
    """Differences from ONNX Runtime's default session options."""

    disabled: tuple[str, ...] = ()
    """Optimiser rewrites to disable, by ONNX Runtime's names, sorted."""
    optimised: bool = True
    """Whether ONNX Runtime may optimise at all."""

    def __str__(self) -> str:
        return ", ".join((*self.disabled, *(() if self.optimised else ("no optimisation",)))) or "none"


DEFAULTS = Settings()
"""For a runtime without errors."""


@dataclass(frozen=True)
class Outcome:
    """Result of the runtime check: the settings to use here, and the errors they avoid."""

    settings: Settings
    faults: Mapping[str, str] = field(default_factory=dict)
    """What was computed wrongly without the settings, and how."""


def merged(settings: Iterable[Settings]) -> Settings:
    """The union of the settings of all machines of a run."""
    settings = list(settings)
    names = {name for setting in settings for name in setting.disabled}
    return Settings(tuple(sorted(names)), all(setting.optimised for setting in settings))
