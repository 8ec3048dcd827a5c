"""Short forms: `train: tokens.arrow` for `train: {path: tokens.arrow}`, a command line for a list of words.

Called by `load` before the overrides, so that an override can set a key of a section written in short form.
"""

from __future__ import annotations

import shlex
from typing import Any

from ortflow.workflow.errors import UserError
from ortflow.workflow.spec.file import installed
from ortflow.workflow.spec.file.document import Document
from ortflow.workflow.spec.launcher_options import Forms, Keys
from ortflow.workflow.spec.problem import KeyPath, Problem

OWN = Forms(
    sections={
        ("program",): "script",
        ("trainer",): "name",
        ("model", "loss"): "kind",
        ("model", "start_from"): "path",
        ("data", "train"): "path",
        ("data", "eval"): "path",
        ("train", "optimizer"): "name",
        ("train", "schedule"): "name",
    },
    commands=(("prepare",), ("program", "command"), ("program", "args")),
    minutes=(("resources", "time_limit"),),
    numbers=(("resources", "memory"),),
)
"""Short forms of all sections except launchers', which define their own."""


def forms_of(values: Any) -> Forms:
    """The short forms that apply to a run file with these values. Raises UserError if a launcher's cannot be loaded."""
    return OWN + installed.forms(installed.names_in(values))


def expand(document: Document) -> None:
    """Replace the short forms in a document."""
    try:
        forms = forms_of(document.values)
    except UserError:  # reported when the sections are validated
        forms = OWN + installed.forms(())
    for path, key in forms.sections.items():
        holder = _holder(document.values, path)
        if holder is not None and isinstance(holder[path[-1]], str):
            holder[path[-1]] = {key: holder[path[-1]]}
            _repeat_line(document, path, (*path, key))
    for path in forms.commands:
        holder = _holder(document.values, path)
        if holder is not None and isinstance(holder[path[-1]], str):
            try:
                holder[path[-1]] = shlex.split(holder[path[-1]])
            except ValueError:
                problem = Problem(path, "has an unclosed quotation mark", "close it")
                document.problems.append(problem)
    for path in forms.lines:
        holder = _holder(document.values, path)
        if holder is not None and isinstance(holder[path[-1]], str):
            holder[path[-1]] = [line for line in holder[path[-1]].split("\n") if line.strip()]
    for path in forms.minutes + forms.numbers:
        holder = _holder(document.values, path)
        if holder is not None and type(holder[path[-1]]) is int:
            holder[path[-1]] = str(holder[path[-1]])


def _repeat_line(document: Document, path: KeyPath, short_for: KeyPath) -> None:
    if path in document.lines:
        document.lines[short_for] = document.lines[path]


def _holder(values: Any, path: Keys) -> dict[str, Any] | None:
    """The mapping that contains the last key of `path`, if it exists."""
    for key in path[:-1]:
        values = values.get(key) if isinstance(values, dict) else None
    return values if isinstance(values, dict) and path[-1] in values else None
