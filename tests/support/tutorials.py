"""What a tutorial's reader does: writes the files that the page shows, and runs its commands, in the page's order."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from documentation import DOCS

FILE = re.compile(r"`([\w./-]+)`:\n\n```\w+\n(.*?)^```$", re.DOTALL | re.MULTILINE)
COMMANDS = re.compile(r"^```console\n(.*?)^```$", re.DOTALL | re.MULTILINE)
ELSEWHERE = ("pip install", "python3 -m venv", ". ~/")
"""Beginnings of commands that install."""


def page(name: str) -> str:
    """The text of docs/tutorials/NAME.md."""
    return (DOCS / "tutorials" / f"{name}.md").read_text()


def write_files(name: str, folder: Path) -> None:
    """Write the files that a page shows."""
    files = FILE.findall(page(name))
    for path, text in files:
        (folder / path).write_text(text)


def commands(name: str) -> list[str]:
    """The commands of a page without those that install."""
    lines = [line[2:] for block in COMMANDS.findall(page(name)) for line in block.splitlines() if line.startswith("$ ")]
    return [line for line in lines if not line.startswith(ELSEWHERE)]


def run_shell(line: str, folder: Path, environment: dict[str, str], timeout: float = 120) -> str:
    """Run a line as the page shows it; its output. Fails the test if it fails."""
    done = subprocess.run(
        ["bash", "-c", line], cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return done.stdout
