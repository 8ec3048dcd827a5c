"""The text of `--help`: commands in groups, and the options of `--host` apart from a command's own.

Used by `ortflow.cli.app`, whose commands are of these classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from typer.core import TyperCommand, TyperGroup

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class GroupedCommands(TyperGroup):
    """Lists its commands by group. A subclass sets `groups`."""

    groups: ClassVar[Mapping[str, Sequence[str]]] = {}
    """Title -> names of commands."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write each group with the first sentence of its commands, all in the same columns."""
        listed = set(self.list_commands(ctx))
        shown = {title: [name for name in names if name in listed] for title, names in self.groups.items()}
        longest = max(len(name) for names in shown.values() for name in names)
        for title, names in shown.items():
            commands = [(name, self.get_command(ctx, name)) for name in names]
            rows = [
                (name.ljust(longest), command.get_short_help_str(formatter.width - 6 - longest))
                for name, command in commands
                if command is not None and not command.hidden
            ]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


class ReachableCommand(TyperCommand):
    """A command that also runs on a login node; its options for that are a group."""

    apart: ClassVar[Sequence[str]] = ()
    """Names of the parameters of that group."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, options, and the options of the group."""
        titles = {"argument": "Arguments", "option": "Options"}
        rows: dict[str, list[Any]] = {"Arguments": [], "Options": [], "On a login node, by ssh": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                apart = param.name in self.apart
                rows["On a login node, by ssh" if apart else titles[param.param_type_name]].append(record)
        for title, records in rows.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)
