"""Short forms: `train: tokens.arrow` for `train: {path: tokens.arrow}`, a command line for a list of words.

Called by `load` before the overrides, so that an override can set a key of a section that the file gives short.
"""

from __future__ import annotations

import shlex
from typing import Any

from ortflow.workflow.spec.file.document import Document
from ortflow.workflow.spec.problem import KeyPath, Problem

SECTIONS: dict[tuple[str, ...], str] = {
    ("trainer",): "name",
    ("model", "loss"): "kind",
    ("data", "train"): "path",
    ("data", "eval"): "path",
    ("train", "optimizer"): "name",
    ("train", "schedule"): "name",
    ("backends", "slurm", "container"): "image",
}
"""Section -> the key that a bare text stands for."""

COMMANDS: tuple[tuple[str, ...], ...] = (
    ("prepare",),
    ("backends", "local", "arguments"),
    ("backends", "slurm", "srun_arguments"),
    ("backends", "slurm", "directives"),
)
"""Lists of words that may be given as one line, split as a shell splits it."""

LINES: tuple[tuple[str, ...], ...] = (("backends", "slurm", "prologue"), ("backends", "slurm", "epilogue"))
"""Lists of lines that may be given as one text of several lines."""

NUMBERS: tuple[tuple[str, ...], ...] = (
    ("resources", "time_limit"),
    ("resources", "memory"),
    ("backends", "kubernetes", "deadline"),
)
"""Texts that may be written as a bare number: minutes, or what is refused for want of a unit."""


def expand(document: Document) -> None:
    """Replace the short forms in a document."""
    for path, key in SECTIONS.items():
        holder = _holder(document.values, path)
        if holder is not None and isinstance(holder[path[-1]], str):
            holder[path[-1]] = {key: holder[path[-1]]}
            _repeat_line(document, path, (*path, key))
    for path in COMMANDS:
        holder = _holder(document.values, path)
        if holder is not None and isinstance(holder[path[-1]], str):
            try:
                holder[path[-1]] = shlex.split(holder[path[-1]])
            except ValueError:
                problem = Problem(path, "has a quotation mark that is never closed", "close it")
                document.problems.append(problem)
    for path in LINES:
        holder = _holder(document.values, path)
        if holder is not None and isinstance(holder[path[-1]], str):
            holder[path[-1]] = [line for line in holder[path[-1]].split("\n") if line.strip()]
    for path in NUMBERS:
        holder = _holder(document.values, path)
        if holder is not None and type(holder[path[-1]]) is int:
            holder[path[-1]] = str(holder[path[-1]])


def _repeat_line(document: Document, path: KeyPath, short_for: KeyPath) -> None:
    if path in document.lines:
        document.lines[short_for] = document.lines[path]


def _holder(values: Any, path: tuple[str, ...]) -> dict[str, Any] | None:
    """The mapping that has the last key of `path`, if there is one."""
    for key in path[:-1]:
        values = values.get(key) if isinstance(values, dict) else None
    return values if isinstance(values, dict) and path[-1] in values else None
