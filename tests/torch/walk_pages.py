"""The pages in docs/walks: their files, and what their commands print."""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from documentation import DOCS
from tiny_runs import Tiny

ELLIPSIS = "…"
LINES = 15
"""Of a walk's run file there are fewer."""


@dataclass(frozen=True)
class Page:
    """A page, its files, and what its commands print."""

    files: Mapping[str, str]
    commands: Mapping[str, list[str]]

    @classmethod
    def read(cls, name: str) -> Page:
        text = (DOCS / "walks" / f"{name}.md").read_text()
        files = dict(re.findall(r"^`([\w.]+)`:\n\n```\w+\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
        commands: dict[str, list[str]] = {}
        for block in re.findall(r"^```console\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            for line in block.splitlines():
                if line.startswith("$ "):
                    commands[line[2:]] = printed = []
                else:
                    printed.append(line)
        return cls(files, commands)

    def write(self, folder: Path) -> dict[str, Any]:
        """Write the files; run the export, and return its variables."""
        for name, text in self.files.items():
            (folder / name).write_text(text)
            assert not name.endswith(".yaml") or len(text.splitlines()) < LINES
        namespace: dict[str, Any] = {}
        exec(compile(self.files["export.py"], str(folder / "export.py"), "exec"), namespace)
        return namespace

    def run(self, folder: Path) -> dict[str, list[str]]:
        """Run the commands as they are printed, with the record of every step; returns what each has printed."""
        lines = {}
        for command in self.commands:
            program, *words = shlex.split(command)
            assert program == "ortflow"
            more = ["monitor.every_steps=1"] if words[0] == "run" else []
            done = Tiny(folder).command(*words, *more, timeout=200, ORTFLOW_CACHE=str(folder / "cache"))
            assert done.code == 0, done.said
            lines[command] = done.said.replace(f"{folder}/", "").splitlines()
        return lines

    def renewed(self, lines: Mapping[str, list[str]]) -> dict[str, list[str]]:
        """What the page shows of each command, with the numbers of the lines that it has printed now.

        A line that has not been printed is left out.
        """
        return {command: _renewed(printed, lines[command]) for command, printed in self.commands.items()}


def _renewed(printed: list[str], lines: list[str]) -> list[str]:
    """Of lines that differ in their numbers alone, a page shows the last ones; logs and output come apart."""
    rest: dict[str, list[str]] = defaultdict(list)
    for line in lines:
        rest[form(line)].append(line)
    renewed: list[str] = []
    for line in reversed(printed):
        if line == ELLIPSIS:
            renewed.append(line)
        elif rest[form(line)]:
            renewed.append(rest[form(line)].pop())
    return renewed[::-1]


def form(line: str) -> str:
    """A printed line without its numbers and folders: those of an epoch's loss differ between processors."""
    return re.sub(r"[\d.,:+-]+(e-?\d+)?", "#", re.sub(r"\S*/", "", line)).strip()
