"""A launcher's section of the run file, `backends.NAME`: keys, short forms, and rules between keys.

The sections of built-in launchers derive from `LauncherOptions`, and so do those of packages
(`ortflow.workflow.spec.file.installed`). Must not depend on a launcher.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from ortflow.workflow.spec.base import Section
from ortflow.workflow.spec.problem import KeyPath, Problem

if TYPE_CHECKING:
    from ortflow.workflow.spec.run import RunSpec

Keys = tuple[str, ...]


@dataclass(frozen=True)
class Forms:
    """Short forms of keys; paths start at the section that defines them."""

    sections: Mapping[Keys, str] = field(default_factory=dict)
    """Section -> the key that a bare text sets."""
    commands: tuple[Keys, ...] = ()
    """Lists of words that may be written as one line, split like a shell command."""
    lines: tuple[Keys, ...] = ()
    """Lists of lines that may be written as one text of several lines."""
    minutes: tuple[Keys, ...] = ()
    """Durations that may be written as a bare number of minutes."""
    numbers: tuple[Keys, ...] = ()
    """Texts for which a bare number is an error because of the missing unit, not because of its type."""
    stand_ins: Mapping[KeyPath, Any] = field(default_factory=dict)
    """Required key -> a placeholder while the rest of an invalid file is checked."""
    reserved: tuple[str, ...] = ()
    """Names at the top of the run directory that the launcher uses."""

    def under(self, path: Keys) -> Forms:
        """The same short forms with paths from an enclosing section."""

        def deeper(paths: tuple[Keys, ...]) -> tuple[Keys, ...]:
            return tuple((*path, *key) for key in paths)

        return Forms(
            {(*path, *key): short for key, short in self.sections.items()},
            deeper(self.commands), deeper(self.lines), deeper(self.minutes), deeper(self.numbers),
            {(*path, *key): value for key, value in self.stand_ins.items()}, self.reserved,
        )  # fmt: skip

    def __add__(self, other: Forms) -> Forms:
        """The union of both."""
        return Forms(
            {**self.sections, **other.sections}, self.commands + other.commands, self.lines + other.lines,
            self.minutes + other.minutes, self.numbers + other.numbers, {**self.stand_ins, **other.stand_ins},
            self.reserved + other.reserved,
        )  # fmt: skip


class LauncherOptions(Section):
    """Base of the section `backends.NAME` of a launcher."""

    FORMS: ClassVar[Forms] = Forms()

    def problems(self, spec: RunSpec, here: KeyPath) -> Iterable[Problem]:
        """Report errors of the section, by itself and in combination with the rest of the run. Pure.

        Parameters
        ----------
        spec
            The run, whose `backends` contain this section.
        here
            The section's key path, a prefix of each problem's path.
        """
        return ()

    def input_keys(self) -> Iterable[Keys]:
        """Keys whose values are files, relative to the run file's folder; paths start at this section. Pure."""
        return ()
