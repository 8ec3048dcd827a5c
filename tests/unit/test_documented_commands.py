"""Commands in the documentation exist: the parser accepts each line that begins with `$ ortflow`."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
import typer
from documentation import DOCS

from ortflow.cli.app import command_line

PAGES = [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))]
USAGE_ERROR = typer.BadParameter.__base__
"""Of the click that typer uses, which may be its own copy."""
COMMANDS = re.compile(r"^\$ (?:[A-Z_]+=\S+ )*ortflow (.*)$", re.MULTILINE)


def documented() -> list[tuple[str, list[str]]]:
    """Page and arguments of each command. Comments, pipes and `[…]` are not part of it; a placeholder N is a number."""
    found = []
    for page in PAGES:
        for line in COMMANDS.findall(page.read_text()):
            plain = re.sub(r"\s+#.*|\s(\||>|&&|2>).*|\[[^]=]*\]|…", "", line)
            words = ["1" if word == "N" else word for word in shlex.split(plain)]
            found.append((f"{page.name}: {line}", words))
    return found


def parse(command: Any, words: list[str]) -> None:
    """Parse the arguments of a command, or of a command of a group. Raises USAGE_ERROR."""
    if not hasattr(command, "commands"):
        command.make_context("ortflow", [*words])
        return
    if words[0] not in command.commands:
        raise typer.BadParameter(f"there is no command {words[0]}")
    parse(command.commands[words[0]], words[1:])


def test_every_documented_command_is_accepted() -> None:
    root = typer.main.get_command(command_line())
    refused = []
    for place, words in documented():
        if words in (["--help"], []):
            continue
        try:
            parse(root, words)
        except (USAGE_ERROR, typer.Exit) as error:
            refused.append(f"{place}: {error}")
    assert refused == []
    assert len(documented()) > 80
    for wrong in (
        ["run", "run.yaml", "--no-such"],
        ["nothing"],
        ["checkpoint", "nothing"],
        ["logs", "--rank", "x", "a"],
    ):
        with pytest.raises(USAGE_ERROR):
            parse(root, wrong)
