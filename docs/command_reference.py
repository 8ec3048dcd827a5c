"""Prints the reference of all commands, from the command line's own parser: `python docs/command_reference.py`.

The documentation site contains it as a page (docs/site_pages.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from ortflow.cli.app import GROUPS, command_line


def commands_page() -> str:
    """Markdown: a heading for each command, its help, usage, arguments and options."""
    root = typer.main.get_command(command_line())
    return "\n".join(
        ["# Commands\n", "`ortflow --help` and `ortflow COMMAND --help` print the same.\n", *_groups(root)]
    )


def _groups(root: Any) -> Iterator[str]:
    for title, verbs in GROUPS.items():
        yield f"## {title}\n"
        for name, verb in verbs.items():
            if not verb.hidden:
                yield from _command(root.commands[name], f"ortflow {name}", 3)


def _command(command: Any, path: str, level: int) -> Iterator[str]:
    context = command.make_context(path, [], resilient_parsing=True)
    yield f"{'#' * level} `{path}`\n"
    yield f"{_text(command.help or command.short_help or '')}\n"
    inner = getattr(command, "commands", {})
    if inner:
        for name, one in inner.items():
            yield from _command(one, f"{path} {name}", level + 1)
        return
    yield f"```\n{' '.join(command.get_usage(context).removeprefix('Usage: ').split())}\n```\n"
    rows = [
        row
        for parameter in command.get_params(context)
        if (row := parameter.get_help_record(context)) and parameter.name != "help"
    ]
    if rows:
        yield "| argument | meaning |\n|---|---|"
        for names, meaning in rows:
            yield f"| `{names.replace('|', chr(92) + '|')}` | {_text(meaning).replace('|', chr(92) + '|')} |"
        yield ""


def _text(text: str) -> str:
    """Paragraphs of one line each; what Markdown would read as HTML is escaped."""
    paragraphs = [" ".join(part.split()) for part in text.replace("\b", "").split("\n\n")]
    return "\n\n".join(paragraphs).replace("<", "&lt;")


if __name__ == "__main__":
    print(commands_page())
